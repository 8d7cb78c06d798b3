// One message as elements. Actions come from outside: copy, edit, retry, and results for tool calls.

import { button, copy, make } from "/page/dom.js";
import { render } from "/page/markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

export function element(message, actions) {
  const node = make("li", { className: `message ${message.role}` }, make("h2", { textContent: NAMES[message.role] }));
  if (message.role === "assistant") {
    node.append(make("div", { className: "answer" }));
    fill(node, message, actions);
  } else {
    node.append(make("div", { className: "body", textContent: message.content }));
  }
  node.append(tools(message, actions));
  return node;
}

// Shows what an answer holds so far.
export function fill(node, message, actions) {
  const folded = node.querySelector("details.thought");
  const parts = [];
  if (message.thought) {
    const summary = message.content || message.calls?.length || message.finish ? "Thoughts" : "Thinking…";
    parts.push(make("details", { className: "thought", open: folded?.open ?? false }, make("summary", { textContent: summary }), make("div", { textContent: message.thought })));
  }
  const body = make("div", { className: message.running ? "body waiting" : "body" });
  body.append(render(message.content, actions.tell));
  parts.push(body, ...(message.calls ?? []).map(call));
  if (message.note) parts.push(make("p", { className: "problem", textContent: message.note }));
  node.querySelector(".answer").replaceChildren(...parts);
}

function call(made) {
  let shown = made.function.arguments;
  try {
    shown = JSON.stringify(JSON.parse(shown), null, 2);
  } catch {
    // still coming
  }
  return make("section", { className: "call", "aria-label": `Call of ${made.function.name}` }, make("h3", { textContent: `Calls ${made.function.name}` }), make("pre", { textContent: shown, tabIndex: 0 }));
}

export function tools(message, actions) {
  const row = make("div", { className: "tools" });
  if (message.running) return row;
  row.append(button("Copy", "Copy this message", () => copy(message.content, actions.tell)));
  if (message.role === "user") row.append(button("Edit", "Edit this message and ask again", () => actions.edit(message)));
  if (message.role === "assistant") row.append(button("Retry", "Answer again", () => actions.retry(message)));
  if (message.told) row.append(make("span", { className: "told", textContent: message.told }));
  return row;
}

export function editor(message, done) {
  const area = make("textarea", { className: "edit", value: message.content, "aria-label": "Edit your message" });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); done(null); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(area.value); }
  });
  const row = make("div", { className: "row" }, button("Ask again", "Send the edited message", () => done(area.value), "main"), button("Cancel", "Keep the message as it is", () => done(null), ""));
  return make("div", {}, area, row);
}

// A form for the results of calls nobody has answered yet.
export function results(calls, done) {
  const fields = calls.map((made) => make("textarea", { rows: 2, required: true, name: made.id }));
  const form = make("form", { className: "call", on: { submit: (event) => { event.preventDefault(); done(calls.map((made, index) => ({ role: "tool", tool_call_id: made.id, content: fields[index].value }))); } } });
  calls.forEach((made, index) => form.append(make("label", {}, `Result of ${made.function.name}`, fields[index])));
  form.append(make("button", { type: "submit", className: "main", textContent: "Give results" }));
  return make("li", { className: "message results" }, form);
}
