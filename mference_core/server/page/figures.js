// Live figures in the header: speed of the running answer, experts found in memory, memory, bytes read.

import { figures } from "/page/api.js";
import { byId, make } from "/page/dom.js";

const BUSY_MS = 1000;
const IDLE_MS = 5000;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

let before = null;
let timer = 0;
let busy = false;

export function bytes(count) {
  const step = Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${(count / 1024 ** step).toFixed(step && count / 1024 ** step < 100 ? 1 : 0)} ${UNITS[step]}`;
}

function show(now) {
  const seconds = before ? (now.at - before.at) / 1000 : 0;
  const made = before ? now.completion_tokens_total - before.completion_tokens_total : 0;
  const rows = [];
  if (seconds && made > 0) rows.push(["speed", `${(made / seconds).toFixed(1)} tok/s`]);
  rows.push(["expert hits", `${(100 * now.expert_hit_rate).toFixed(0)} %`]);
  if (now.process_resident_bytes) rows.push(["memory", bytes(now.process_resident_bytes)]);
  rows.push(["read", bytes(now.expert_bytes_read_total)]);
  byId("figures").replaceChildren(...rows.map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
  before = now;
}

async function turn() {
  clearTimeout(timer);
  if (!document.hidden) {
    try {
      show({ at: performance.now(), ...(await figures()) });
    } catch {
      byId("figures").replaceChildren();
    }
  }
  timer = setTimeout(turn, busy ? BUSY_MS : IDLE_MS);
}

export function watch(answering) {
  busy = answering;
  turn();
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) turn(); });
