// The settings dialog, and what it means for a request.

import { byId } from "/page/dom.js";
import * as store from "/page/store.js";

const NUMBERS = ["temperature", "top_p", "max_completion_tokens", "seed"];

let kept = store.settings();

export function apply() {
  document.documentElement.dataset.theme = kept.theme;
}

export function open() {
  byId("set-system").value = kept.system;
  byId("set-tools").value = kept.tools;
  byId("set-theme").value = kept.theme;
  byId("set-token").value = store.token();
  for (const name of NUMBERS) byId(`set-${name}`).value = kept.sampling[name] ?? "";
  byId("set-reasoning_effort").value = kept.sampling.reasoning_effort ?? "";
  wrong("");
  byId("settings").showModal();
}

function wrong(text) {
  byId("tools-problem").textContent = text;
  byId("tools-problem").hidden = !text;
}

// Returns the tools of a text, [] for none; throws with the reason.
function tools(text) {
  if (!text.trim()) return [];
  const made = JSON.parse(text);
  if (!Array.isArray(made)) throw new Error("the tools are no JSON list");
  return made;
}

// Takes over what the dialog holds; returns false, saying why, if that cannot be.
export function close() {
  try {
    tools(byId("set-tools").value);
  } catch (error) {
    wrong(`Tools: ${error.message}`);
    byId("set-tools").focus();
    return false;
  }
  const sampling = {};
  for (const name of NUMBERS) if (byId(`set-${name}`).value !== "") sampling[name] = Number(byId(`set-${name}`).value);
  if (byId("set-reasoning_effort").value) sampling.reasoning_effort = byId("set-reasoning_effort").value;
  kept = { theme: byId("set-theme").value, system: byId("set-system").value, tools: byId("set-tools").value, sampling };
  store.keepSettings(kept);
  store.keepToken(byId("set-token").value);
  apply();
  return true;
}

// What settings add to a request.
export function request() {
  const made = tools(kept.tools);
  return { ...kept.sampling, ...(made.length ? { tools: made } : {}) };
}

export const guidance = () => (kept.system.trim() ? [{ role: "system", content: kept.system }] : []);
