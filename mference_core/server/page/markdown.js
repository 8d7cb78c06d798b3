// Markdown to elements: paragraphs, headings, lists, quotes, tables, fences; emphasis, code and links inside them.
// What a model writes reaches the page as text nodes only, and links lead to http, https and mailto only.

import { button, copy, make } from "/page/dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const ROW = /^\s*\|(.+)\|\s*$/;
const DIVIDER = /^\s*\|(\s*:?-+:?\s*\|)+\s*$/;
const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|(\*\*|__)(?=\S)([\s\S]*?\S)\3|(\*|_)(?=\S)([\s\S]*?\S)\5(?![\w*])|~~(?=\S)([\s\S]*?\S)~~|\[([^\]\n]*)\]\(([^)\s]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])/;

export function render(text, told = () => {}) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n"), told));
  return fragment;
}

function blocks(lines, told) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) { at += 1; continue; }
    const fence = FENCE.exec(line);
    if (fence) {
      let end = at + 1;
      while (end < lines.length && !lines[end].trim().startsWith(fence[1])) end += 1;
      made.push(code(lines.slice(at + 1, end).join("\n"), fence[2].trim(), told));
      at = end + 1;
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading) {
      made.push(make(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2])));
      at += 1;
      continue;
    }
    if (RULE.test(line)) { made.push(make("hr")); at += 1; continue; }
    if (/^ {0,3}>/.test(line)) {
      const end = run(lines, at, (next) => /^ {0,3}>/.test(next));
      made.push(make("blockquote", {}, ...blocks(lines.slice(at, end).map((next) => next.replace(/^ {0,3}> ?/, "")), told)));
      at = end;
      continue;
    }
    if (ROW.test(line) && at + 1 < lines.length && DIVIDER.test(lines[at + 1])) {
      const end = run(lines, at + 2, (next) => ROW.test(next));
      made.push(table(line, lines.slice(at + 2, end)));
      at = end;
      continue;
    }
    if (ITEM.test(line)) {
      const end = run(lines, at, (next, index) => ITEM.test(next) || /^\s{2,}\S/.test(next) || (!next.trim() && index + 1 < lines.length && (ITEM.test(lines[index + 1]) || /^\s{2,}\S/.test(lines[index + 1]))));
      made.push(list(lines.slice(at, end), told));
      at = end;
      continue;
    }
    const end = run(lines, at, (next, index) => next.trim() && (index === at || !(FENCE.test(next) || HEADING.test(next) || RULE.test(next) || ITEM.test(next) || /^ {0,3}>/.test(next))));
    made.push(make("p", {}, ...inline(lines.slice(at, end).join("\n"))));
    at = end;
  }
  return made;
}

function run(lines, from, belongs) {
  let end = from;
  while (end < lines.length && belongs(lines[end], end)) end += 1;
  return end;
}

function code(text, language, told) {
  const block = make("pre", { tabIndex: 0 }, make("code", { textContent: text, className: language && `language-${language}` }));
  block.append(button("Copy", "Copy this code", () => copy(text, told), "quiet copy"));
  return block;
}

const cells = (line) => ROW.exec(line)[1].split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function table(head, rows) {
  const row = (tag, line) => make("tr", {}, ...cells(line).map((cell) => make(tag, {}, ...inline(cell))));
  return make("table", {}, make("thead", {}, row("th", head)), make("tbody", {}, ...rows.map((line) => row("td", line))));
}

function list(lines, told) {
  const [, margin, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= margin.length) items.push([item[3]]);
    else items.at(-1).push(line.replace(new RegExp(`^\\s{0,${margin.length + mark.length + 1}}`), ""));
  }
  const ordered = /\d/.test(mark);
  const made = make(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {});
  for (const item of items) {
    const inner = blocks(item, told);
    const [first, ...rest] = inner;
    made.append(make("li", {}, ...(first && first.tagName === "P" ? first.childNodes : first ? [first] : []), ...rest));
  }
  return made;
}

function inline(text) {
  const made = [];
  let rest = text;
  for (let found = INLINE.exec(rest); found; found = INLINE.exec(rest)) {
    made.push(...broken(rest.slice(0, found.index)));
    const [whole, , codeText, , strong, , soft, struck, label, target, address] = found;
    if (codeText !== undefined) made.push(make("code", { textContent: codeText.replace(/^ (.*) $/, "$1") }));
    else if (strong !== undefined) made.push(make("strong", {}, ...inline(strong)));
    else if (soft !== undefined) made.push(make("em", {}, ...inline(soft)));
    else if (struck !== undefined) made.push(make("s", {}, ...inline(struck)));
    else made.push(link(address ?? target, address ?? label, whole));
    rest = rest.slice(found.index + whole.length);
  }
  return [...made, ...broken(rest)];
}

function link(target, label, whole) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return whole;
  return make("a", { href: target, target: "_blank", rel: "noopener noreferrer", textContent: label });
}

function broken(text) {
  return text.split(/ {2,}\n/).flatMap((part, index) => (index ? [make("br"), part] : [part])).filter((part) => part !== "");
}
