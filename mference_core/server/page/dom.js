// Making elements: text is always text, never markup.

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function button(label, title, listener, className = "quiet") {
  return make("button", { type: "button", className, title, textContent: label, "aria-label": title, on: { click: listener } });
}

export const byId = (id) => document.getElementById(id);

export async function copy(text, told) {
  try {
    await navigator.clipboard.writeText(text);
    told("Copied");
  } catch {
    told("The browser did not allow copying");
  }
}
