"""Anthropic's Messages: what a request may hold."""

from mference_core.sampling import MAX_TOP_K
from mference_core.server.fields import Either, Field, Json, ListOf, Number, Record, Tagged, Text, Truth, Whole
from mference_core.server.openai_fields import MAX_STOPS, NAME

CACHE = Record(
    fields={
        "type": Field(kind=Text(choices=("ephemeral",)), required=True),
        "ttl": Field(kind=Text(choices=("5m", "1h"))),
    }
)
MARKED = {"cache_control": Field(kind=CACHE, inert=True, note="Every prompt is looked up in the cache.")}
NOT_CITED = {"citations": "the models here cite nothing"}

TEXT = Record(fields={"text": Field(kind=Text(), required=True), **MARKED}, refuses=NOT_CITED)
TEXTS = ListOf(kind=Tagged(records={"text": TEXT}))
TEXT_OR_TEXTS = Either(kinds=(Text(), TEXTS), what="a string or a list of text blocks")
NO_MEDIA = {"image": "the models here read text", "document": "the models here read text"}

TOOL_USE = Record(
    fields={
        "id": Field(kind=Text(least=1), required=True),
        "name": Field(kind=Text(pattern=NAME), required=True),
        "input": Field(kind=Json(), required=True),
        **MARKED,
    },
    refuses={"caller": "calls are made by the model alone", "toolset_name": "there are no tool sets"},
)
TOOL_RESULT = Record(
    fields={
        "tool_use_id": Field(kind=Text(least=1), required=True),
        "content": Field(
            kind=Either(
                kinds=(Text(), ListOf(kind=Tagged(records={"text": TEXT}, refuses=NO_MEDIA))),
                what="a string or a list of text blocks",
            )
        ),
        "is_error": Field(kind=Truth(), note="An error's text is told to the model as one."),
        **MARKED,
    }
)
THINKING = Record(
    fields={
        "thinking": Field(kind=Text(), required=True),
        "signature": Field(kind=Text(), inert=True, note="Not checked."),
    }
)

USER_BLOCK = Tagged(records={"text": TEXT, "tool_result": TOOL_RESULT}, refuses=NO_MEDIA)
ASSISTANT_BLOCK = Tagged(
    records={"text": TEXT, "tool_use": TOOL_USE, "thinking": THINKING},
    refuses={"redacted_thinking": "this server hides no reasoning, so it made none"},
)
MESSAGE = Tagged(
    tag="role",
    records={
        "system": Record(fields={"content": Field(kind=TEXT_OR_TEXTS, required=True)}),
        "user": Record(
            fields={
                "content": Field(
                    kind=Either(kinds=(Text(), ListOf(kind=USER_BLOCK, least=1)), what="a string or a list of blocks"),
                    required=True,
                )
            }
        ),
        "assistant": Record(
            fields={
                "content": Field(
                    kind=Either(kinds=(Text(), ListOf(kind=ASSISTANT_BLOCK)), what="a string or a list of blocks"),
                    required=True,
                )
            }
        ),
    },
)
TOOL = Tagged(
    records={
        "custom": Record(
            fields={
                "name": Field(kind=Text(pattern=NAME), required=True),
                "description": Field(kind=Text()),
                "input_schema": Field(kind=Json(), required=True, note="A JSON Schema of an object."),
                "strict": Field(kind=Truth(), note="Whether calls must fit the schema."),
                "eager_input_streaming": Field(kind=Truth(), inert=True, note="A call is sent when it is complete."),
                **MARKED,
            },
            refuses={
                "allowed_callers": "calls are made by the model alone",
                "defer_loading": "all tools are shown to the model",
                "input_examples": "put them into the description",
            },
        )
    },
    usual="custom",
)
ONE_CALL = {"disable_parallel_tool_use": Field(kind=Truth())}
CHOICE = Tagged(
    records={
        "auto": Record(fields=ONE_CALL),
        "any": Record(fields=ONE_CALL),
        "tool": Record(fields={"name": Field(kind=Text(pattern=NAME), required=True), **ONE_CALL}),
        "none": Record(fields={}),
    }
)
DISPLAY = Field(kind=Text(choices=("summarized", "omitted")), note="Reasoning is shown whole, or left out.")
REASONING = Tagged(
    records={
        "enabled": Record(fields={"budget_tokens": Field(kind=Whole(low=1), required=True), "display": DISPLAY}),
        "adaptive": Record(fields={"display": DISPLAY}),
        "disabled": Record(fields={}),
    }
)
OUTPUT = Record(
    fields={
        "effort": Field(kind=Text(choices=("low", "medium", "high", "xhigh", "max"))),
        "format": Field(
            kind=Tagged(records={"json_schema": Record(fields={"schema": Field(kind=Json(), required=True)})})
        ),
    }
)

CONTEXT = Record(
    fields={
        "edits": Field(
            kind=ListOf(
                kind=Tagged(
                    records={
                        "clear_thinking_20251015": Record(
                            fields={"keep": Field(kind=Text(choices=("all",)), required=True)}
                        )
                    },
                    refuses={"clear_tool_uses_20250919": "the client keeps the conversation"},
                )
            )
        )
    }
)

CONVERSATION = {
    "model": Field(kind=Text(least=1), required=True),
    "messages": Field(kind=ListOf(kind=MESSAGE, least=1), required=True),
    "system": Field(kind=TEXT_OR_TEXTS),
    "tools": Field(kind=ListOf(kind=TOOL)),
    "tool_choice": Field(kind=CHOICE),
    "thinking": Field(kind=REASONING),
    "output_config": Field(kind=OUTPUT),
    "context_management": Field(kind=CONTEXT, inert=True, note="All is kept."),
    **MARKED,
}
NOT_HERE = {
    "container": "no code is run here",
    "diagnostics": "the figures are at /metrics",
    "inference_geo": "there is one machine",
    "mcp_servers": "the server reaches no other machine",
    "speed": "there is one speed",
    "user_profile_id": "there are no profiles",
    "workspace_id": "there are no workspaces",
}

REQUEST = Record(
    fields={
        **CONVERSATION,
        "max_tokens": Field(kind=Whole(low=1), required=True),
        "stream": Field(kind=Truth()),
        "stop_sequences": Field(kind=ListOf(kind=Text(least=1), most=MAX_STOPS)),
        "temperature": Field(kind=Number(low=0.0, high=1.0)),
        "top_p": Field(kind=Number(low=0.0, high=1.0, above=True)),
        "top_k": Field(kind=Whole(low=0, high=MAX_TOP_K), note="0 is off."),
        "metadata": Field(kind=Record(fields={"user_id": Field(kind=Text())}), inert=True),
        "service_tier": Field(kind=Text(choices=("auto", "standard_only")), inert=True),
    },
    refuses=NOT_HERE,
)
COUNT = Record(fields=CONVERSATION, refuses=NOT_HERE)
