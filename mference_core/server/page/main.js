// The page: a list of conversations, one of them open, and at most one answer on its way.

import { answer, models } from "/page/api.js";
import { button, byId, make } from "/page/dom.js";
import { watch } from "/page/figures.js";
import * as shown from "/page/messages.js";
import * as settings from "/page/settings.js";
import * as store from "/page/store.js";

const PAINT_MS = 60;
const NEAR_PIXELS = 80;

let chat = store.newChat();
let running = null; // the AbortController of the answer on its way
const nodes = new Map();

const list = byId("messages");
const ask = byId("ask");

const actions = {
  tell: (text) => { byId("status").textContent = text; },
  edit,
  retry: (message) => { cut(message); run(); },
};

// ---- what is on the screen

function paint() {
  nodes.clear();
  list.replaceChildren(...chat.messages.map((message) => {
    const node = shown.element(message, actions);
    nodes.set(message, node);
    return node;
  }));
  const open = waiting();
  if (open.length) list.append(shown.results(open, (messages) => { chat.messages.push(...messages); run(); }));
  byId("empty").hidden = chat.messages.length > 0;
  paintList();
  follow(true);
}

function paintList() {
  byId("chat-list").replaceChildren(...store.chats().map((other) => {
    const here = other.id === chat.id;
    const pick = make("button", { type: "button", textContent: other.title || "Untitled", title: other.title, "aria-current": here ? "true" : null, on: { click: () => openChat(other) } });
    const remove = button("✕", `Delete ${other.title || "this conversation"}`, () => removeChat(other));
    return make("li", { className: here ? "here" : "" }, pick, remove);
  }));
}

function follow(always = false) {
  const far = list.scrollHeight - list.scrollTop - list.clientHeight;
  if (always || far < NEAR_PIXELS) list.scrollTop = list.scrollHeight;
  byId("latest").hidden = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_PIXELS;
}

function problem(text, remedy = null, label = "Try again") {
  byId("problem").hidden = !text;
  byId("problem").replaceChildren(text ?? "", ...(remedy ? [button(label, label, remedy, "")] : []));
}

function busy(controller) {
  running = controller;
  byId("send").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
  watch(Boolean(controller));
}

// ---- conversations

function openChat(other) {
  running?.abort();
  chat = other;
  problem(null);
  paint();
  ask.focus();
}

function removeChat(other) {
  if (!confirm(`Delete “${other.title || "this conversation"}”?`)) return;
  store.drop(other.id);
  if (other.id === chat.id) openChat(store.chats()[0] ?? store.newChat());
  else paintList();
}

function keep() {
  const wrong = store.keep(chat);
  if (wrong) problem(wrong);
  paintList();
}

// ---- asking

// Calls of the last answer that have no result yet.
function waiting() {
  const last = chat.messages.at(-1);
  return last?.role === "assistant" && !last.running ? last.calls ?? [] : [];
}

function cut(message) {
  running?.abort();
  chat.messages.length = chat.messages.indexOf(message);
}

function edit(message) {
  const node = nodes.get(message);
  const form = shown.editor(message, (text) => {
    if (text === null || !text.trim()) { paint(); ask.focus(); return; }
    cut(message);
    send(text);
  });
  node.replaceChildren(node.querySelector("h2"), form);
  form.querySelector("textarea").focus();
}

function send(text) {
  chat.messages.push({ role: "user", content: text });
  run();
}

function history(messages) {
  return messages.map(({ role, content, calls, thought, tool_call_id }) => ({
    role,
    content,
    ...(calls?.length ? { tool_calls: calls } : {}),
    ...(role === "assistant" && thought ? { reasoning_content: thought } : {}),
    ...(tool_call_id ? { tool_call_id } : {}),
  }));
}

async function run() {
  const open = chat;
  const controller = new AbortController();
  const request = { model: byId("model").value, messages: [...settings.guidance(), ...history(open.messages)], ...settings.request() };
  const message = { role: "assistant", content: "", thought: "", calls: [], running: true };
  open.messages.push(message);
  problem(null);
  busy(controller);
  paint();
  keep();
  actions.tell("The model is answering");
  const began = performance.now();
  let first = 0;
  let usage = null;
  let painted = 0;
  const refresh = (force) => {
    if (open !== chat || (!force && performance.now() - painted < PAINT_MS)) return;
    painted = performance.now();
    shown.fill(nodes.get(message), message, actions);
    follow();
  };
  let failed = null;
  try {
    for await (const part of answer(request, controller.signal)) {
      first ||= performance.now();
      message.content += part.text ?? "";
      message.thought += part.thought ?? "";
      if (part.call) gather(message.calls, part.call);
      if (part.finish) message.finish = part.finish;
      usage = part.usage ?? usage;
      refresh(false);
    }
    if (message.finish === "length") message.note = "The answer was cut at the most tokens allowed.";
  } catch (error) {
    failed = error;
    if (controller.signal.aborted) message.note = "Stopped.";
  }
  delete message.running;
  if (usage) message.told = figures(usage, began, first);
  const nothing = !message.content && !message.thought && !message.calls.length;
  if (nothing) open.messages.splice(open.messages.indexOf(message), 1);
  if (running === controller) busy(null);
  store.keep(open);
  if (open !== chat) { paintList(); return; }
  paint();
  if (failed && !controller.signal.aborted) explain(failed);
  else actions.tell(controller.signal.aborted ? "Stopped" : `Answered. ${message.content}`);
  ask.focus();
}

function explain(error) {
  if (error.status === 401) { problem("This server asks for an access token.", settings.open, "Enter the token"); return; }
  const text = error.status === undefined ? "The server cannot be reached." : `${error.message}.`.replace("..", ".");
  problem(text, chat.messages.length ? run : null);
}

// Calls come in pieces, told apart by index.
function gather(calls, piece) {
  const made = (calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  made.id ||= piece.id ?? "";
  made.function.name += piece.function?.name ?? "";
  made.function.arguments += piece.function?.arguments ?? "";
}

function figures(usage, began, first) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const seconds = (performance.now() - first) / 1000;
  const speed = usage.completion_tokens > 1 && seconds > 0 ? ` at ${((usage.completion_tokens - 1) / seconds).toFixed(1)} tok/s` : "";
  return `${usage.prompt_tokens} prompt tokens, ${cached} of them reused; first token after ${((first - began) / 1000).toFixed(2)} s; ${usage.completion_tokens} tokens${speed}`;
}

// ---- what people do

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running || !ask.value.trim()) return;
  if (waiting().length) { problem("The model waits for the results of its calls: give them above, or edit an earlier message."); return; }
  send(ask.value);
  ask.value = "";
});

ask.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); byId("composer").requestSubmit(); }
  const last = chat.messages.findLast((message) => message.role === "user");
  if (event.key === "ArrowUp" && !ask.value && last && !running) { event.preventDefault(); edit(last); }
});

document.addEventListener("keydown", (event) => {
  const command = event.ctrlKey || event.metaKey;
  if (event.key === "Escape" && running && !byId("settings").open) running.abort();
  if (command && event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); openChat(store.newChat()); }
  if (command && event.key === ",") { event.preventDefault(); settings.open(); }
});

list.addEventListener("scroll", () => { byId("latest").hidden = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_PIXELS; });
byId("latest").addEventListener("click", () => follow(true));
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => openChat(store.newChat()));
byId("open-settings").addEventListener("click", settings.open);
byId("menu").addEventListener("click", () => {
  const narrow = matchMedia("(max-width: 50rem)").matches;
  const on = document.body.classList.toggle(narrow ? "unfolded" : "folded");
  byId("menu").setAttribute("aria-expanded", String(narrow ? on : !on));
});
byId("settings").addEventListener("close", () => { if (!settings.close()) byId("settings").showModal(); else start(); });
byId("export").addEventListener("click", () => {
  const file = new Blob([JSON.stringify(store.chats(), null, 1)], { type: "application/json" });
  const link = make("a", { href: URL.createObjectURL(file), download: "conversations.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});
byId("clear").addEventListener("click", () => {
  if (!confirm("Delete all conversations?")) return;
  for (const other of store.chats()) store.drop(other.id);
  openChat(store.newChat());
});

async function start() {
  try {
    const chosen = byId("model").value;
    const names = await models();
    byId("model").replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
    if (names.includes(chosen)) byId("model").value = chosen;
    problem(null);
  } catch (error) {
    if (error.status === 401) explain(error);
    else problem("The server cannot be reached.", start);
  }
  watch(false);
}

settings.apply();
paint();
start();
ask.focus();
