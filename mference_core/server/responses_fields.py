"""OpenAI's Responses: what a request may hold."""

from mference_core.sampling import MAX_LOGPROBS
from mference_core.server import openai_fields as shared
from mference_core.server.fields import Either, Field, Json, ListOf, Number, Record, Tagged, Text, Truth, Whole
from mference_core.server.openai_fields import EFFORT, FUNCTION, JSON_SCHEMA, NAME

ENCRYPTED, WITH_LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"

NO_MEDIA = {"input_image": "the models here read text", "input_file": "the models here read text"}
KEPT = {
    "id": Field(kind=Text(), inert=True),
    "status": Field(kind=Text(choices=("in_progress", "completed", "incomplete")), inert=True),
}
PLAIN = Record(fields={"text": Field(kind=Text(), required=True)})
OUTPUT_TEXT = Record(
    fields={
        "text": Field(kind=Text(), required=True),
        "annotations": Field(kind=ListOf(kind=Json(), most=0)),
        "logprobs": Field(kind=ListOf(kind=Json()), inert=True),
    }
)
CONTENT = Either(
    kinds=(
        Text(),
        ListOf(
            kind=Tagged(
                records={"input_text": PLAIN, "output_text": OUTPUT_TEXT, "text": PLAIN},
                refuses=NO_MEDIA | {"refusal": "the models here do not mark refusals"},
            )
        ),
    ),
    what="a string or a list of text parts",
)
MESSAGE = Record(
    fields={
        "role": Field(kind=Text(choices=("system", "developer", "user", "assistant")), required=True),
        "content": Field(kind=CONTENT, required=True),
        "phase": Field(kind=Text(choices=("commentary", "final_answer")), inert=True),
        **KEPT,
    }
)
CALL = Record(
    fields={
        "call_id": Field(kind=Text(least=1), required=True),
        "name": Field(kind=Text(pattern=NAME), required=True),
        "arguments": Field(kind=Text(), required=True),
        "namespace": Field(kind=Text(pattern=NAME)),
        **KEPT,
    },
    refuses={"async": "calls are waited for", "caller": "calls are made by the model alone"},
)
RESULT = Record(
    fields={
        "call_id": Field(kind=Text(least=1), required=True),
        "output": Field(
            kind=Either(
                kinds=(Text(), ListOf(kind=Tagged(records={"input_text": PLAIN}, refuses=NO_MEDIA))),
                what="a string or a list of text parts",
            ),
            required=True,
        ),
        **KEPT,
    }
)
REASONING_ITEM = Record(
    fields={
        "summary": Field(kind=ListOf(kind=Tagged(records={"summary_text": PLAIN}))),
        "content": Field(kind=ListOf(kind=Tagged(records={"reasoning_text": PLAIN}))),
        "encrypted_content": Field(kind=Text()),
        **KEPT,
    }
)
ITEM = Tagged(
    records={
        "message": MESSAGE,
        "function_call": CALL,
        "function_call_output": RESULT,
        "reasoning": REASONING_ITEM,
    },
    usual="message",
    refuses={"item_reference": "nothing is kept here; send the item itself"},
)
FUNCTION_TOOL = Record(
    fields=FUNCTION,
    refuses={
        "allowed_callers": "calls are made by the model alone",
        "async": "calls are waited for",
        "defer_loading": "all tools are shown to the model",
        "output_schema": "put it into the description",
    },
)
NAMESPACE = Record(
    fields={
        "name": Field(kind=Text(pattern=NAME), required=True),
        "description": Field(kind=Text()),
        "tools": Field(
            kind=ListOf(
                kind=Tagged(records={"function": FUNCTION_TOOL}, refuses={"custom": "tools here are functions"})
            ),
            required=True,
        ),
    }
)
TOOL = Tagged(
    records={"function": FUNCTION_TOOL, "namespace": NAMESPACE},
    refuses=dict.fromkeys(
        (
            "apply_patch",
            "code_interpreter",
            "computer_use_preview",
            "custom",
            "file_search",
            "image_generation",
            "local_shell",
            "mcp",
            "shell",
            "web_search",
            "web_search_preview",
        ),
        "tools here are functions that the client runs",
    ),
)
CHOICE = Either(
    kinds=(
        shared.CHOICE_WORDS,
        Tagged(records={"function": Record(fields={"name": Field(kind=Text(pattern=NAME), required=True)})}),
    ),
    what="'auto', 'none', 'required' or a named function",
)
FORMAT = Tagged(
    records={"text": Record(fields={}), "json_object": Record(fields={}), "json_schema": Record(fields=JSON_SCHEMA)}
)

REQUEST = Record(
    fields={
        "model": Field(kind=Text(least=1), required=True),
        "input": Field(
            kind=Either(kinds=(Text(least=1), ListOf(kind=ITEM, least=1)), what="a string or a list of items"),
            required=True,
        ),
        "instructions": Field(kind=Text()),
        "max_output_tokens": Field(kind=Whole(low=1)),
        "temperature": Field(kind=Number(low=0.0, high=2.0), note="0 is greedy."),
        "top_p": Field(kind=Number(low=0.0, high=1.0, above=True), note="1 is off."),
        "top_logprobs": Field(kind=Whole(low=0, high=MAX_LOGPROBS)),
        "tools": Field(kind=ListOf(kind=TOOL)),
        "tool_choice": Field(kind=CHOICE),
        "parallel_tool_calls": Field(kind=Truth()),
        "reasoning": Field(
            kind=Record(
                fields={
                    "effort": Field(kind=EFFORT),
                    "summary": Field(
                        kind=Text(choices=("auto",)), note="Reasoning is told whole; there is no summary."
                    ),
                },
                refuses={"generate_summary": "reasoning is told whole"},
            )
        ),
        "text": Field(
            kind=Record(fields={"format": Field(kind=FORMAT), "verbosity": Field(kind=Text(choices=("medium",)))})
        ),
        "include": Field(kind=ListOf(kind=Text(choices=(ENCRYPTED, WITH_LOGPROBS)))),
        "stream": Field(kind=Truth()),
        "stream_options": Field(kind=Record(fields={"include_obfuscation": Field(kind=Truth(only=False))})),
        "truncation": Field(kind=Text(choices=("disabled",)), note="A prompt is never cut."),
        "background": Field(kind=Truth(only=False)),
        "client_metadata": Field(kind=Json(), inert=True),
        **shared.IDENTITY,
    },
    refuses={name: why for name, why in shared.NOT_HERE.items() if name != "background"}
    | {
        "access_programs": "there are none here",
        "background_options": "answers are made while the client waits",
        "context_management": "the client keeps the conversation",
        "conversation": "the client keeps the conversation",
        "image": "the models here write text",
        "max_tool_calls": "tools are run by the client, which can stop",
        "previous_response_id": "nothing is kept here; send the whole conversation as input",
        "prompt": "there are no stored prompts here",
    },
)
