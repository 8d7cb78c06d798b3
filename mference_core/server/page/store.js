// Conversations and settings, kept in this browser only.

const CHAT = "mference.chat.";
const SETTINGS = "mference.settings";
const TOKEN = "mference.token";

export function newChat() {
  return { id: crypto.randomUUID(), title: "", updated: Date.now(), messages: [] };
}

function read(storage, key) {
  try {
    return JSON.parse(storage.getItem(key));
  } catch {
    return null;
  }
}

export function chats() {
  return Object.keys(localStorage)
    .filter((key) => key.startsWith(CHAT))
    .map((key) => read(localStorage, key))
    .filter((chat) => chat && typeof chat.id === "string" && Array.isArray(chat.messages))
    .sort((a, b) => b.updated - a.updated);
}

// Returns why it could not be kept, or nothing.
export function keep(chat) {
  chat.updated = Date.now();
  const first = chat.messages.find((message) => message.role === "user");
  chat.title ||= first ? first.content.trim().replace(/\s+/g, " ").slice(0, 60) : "";
  try {
    localStorage.setItem(CHAT + chat.id, JSON.stringify(chat));
    return null;
  } catch {
    return "This browser's storage is full: delete or export conversations to keep this one.";
  }
}

export const drop = (id) => localStorage.removeItem(CHAT + id);

export function settings() {
  return { theme: "auto", system: "", tools: "", sampling: {}, ...read(localStorage, SETTINGS) };
}

export const keepSettings = (value) => localStorage.setItem(SETTINGS, JSON.stringify(value));

export const token = () => sessionStorage.getItem(TOKEN) ?? "";

export const keepToken = (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN));
