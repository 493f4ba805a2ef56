// Makes elements. Text is text: nothing here, or anywhere, takes HTML.

const SHOWN_AT_MOST = 64 * 1024;
// What turns or hides text around it: senders may write it, and it is shown as its number.
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/gu;

export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, String(value));
  }
  made.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return made;
}

export function put(into, ...children) {
  into.replaceChildren(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return into;
}

export function table(heads, rows, empty = "none") {
  if (!rows.length) return h("p", { class: "dim" }, empty);
  return h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "table" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell ?? "not told")))))));
}

export function facts(pairs) {
  return h("dl", {}, pairs.filter(([, value]) => value != null)
    .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

// What somebody else wrote: controls by their numbers, and cut, which is said.
export function foreign(text, most = SHOWN_AT_MOST) {
  const cut = text.length > most;
  const shown = (cut ? text.slice(0, most) : text).replace(
    CONTROLS, (c) => `<U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}>`);
  if (!cut) return h("bdi", { class: "foreign" }, shown);
  return [h("bdi", { class: "foreign" }, `${shown} … cut: ${text.length.toLocaleString("en")} characters`), copying(() => text)];
}

// Puts the whole of what is cut into the clipboard: also what is not shown of it.
function copying(whole) {
  const button = h("button", { onclick: async () => {
    try {
      await navigator.clipboard.writeText(whole());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not copied: browsers let pages on loopback or with TLS alone";
    }
  } }, "Copy the whole");
  return button;
}

export function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
}

export function base64Of(text) {
  return btoa(String.fromCharCode(...new TextEncoder().encode(text)));
}

function asHex(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join(" ");
}

// Bytes of a key, a value or a header: text if they are text, otherwise hex.
export function content(base64) {
  if (base64 == null) return h("span", { class: "dim" }, "null");
  const bytes = bytesOf(base64);
  const cut = bytes.length > SHOWN_AT_MOST;
  const some = cut ? bytes.slice(0, SHOWN_AT_MOST) : bytes;
  const note = (whole) => cut && [h("p", { class: "dim" }, `the first 64 KiB of ${bytes.length.toLocaleString("en")} bytes`), copying(whole)];
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(some, { stream: cut });
    return [h("pre", { tabindex: cut ? 0 : null }, foreign(pretty(text), Infinity)), note(() => new TextDecoder().decode(bytes))];
  } catch {
    return [h("pre", { tabindex: cut ? 0 : null }, asHex(some)), note(() => asHex(bytes))];
  }
}

function pretty(text) {
  if (!/^\s*[{[]/.test(text)) return text;
  try {
    // Only if nothing is lost by it, such as the digits of a long number.
    const parsed = JSON.parse(text);
    return JSON.stringify(parsed) === text.replace(/\s/g, "") ? JSON.stringify(parsed, null, 2) : text;
  } catch {
    return text;
  }
}
