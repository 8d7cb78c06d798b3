// What the page asks of the server: the models, the figures, and answers as they come.

import { token } from "/page/store.js";

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}) };
  if (token()) headers.authorization = `Bearer ${token()}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not a body of ours: the status says all
  }
  throw new ServerError(response.status, message);
}

export async function models() {
  return (await (await ask("/v1/models")).json()).data.map((model) => model.id);
}

export async function figures() {
  return (await ask("/figures")).json();
}

// Yields the parts of one answer: {text}, {thought}, {call}, {finish}, {usage}.
export async function* answer(request, signal) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const response = await ask("/v1/chat/completions", { method: "POST", body, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(500, chunk.error.message);
    if (chunk.usage) yield { usage: chunk.usage };
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
    if (thought) yield { thought };
    if (content) yield { text: content };
    for (const call of calls ?? []) yield { call };
    if (choice.finish_reason) yield { finish: choice.finish_reason };
  }
}

async function* events(stream) {
  let rest = "";
  for await (const part of stream.pipeThrough(new TextDecoderStream())) {
    const blocks = (rest + part).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
  if (rest.trim()) throw new ServerError(0, "the answer broke off");
}
