// Times in the viewer's zone, with UTC beside them, both named.

import { h } from "./dom.js";

export const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone;
const LOCAL = new Intl.DateTimeFormat("sv-SE", {
  year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit",
  second: "2-digit", fractionalSecondDigits: 3, hourCycle: "h23",
});

export function moment(ms) {
  if (ms == null) return "not told";
  const at = Number(ms);
  if (!Number.isFinite(at) || Math.abs(at) > 8.64e15) return String(ms);
  const utc = new Date(at).toISOString();
  return ZONE === "UTC" ? utc : `${LOCAL.format(at).replace(",", ".")} ${ZONE} (${utc})`;
}

// The same for a cell: broken between the two, never within a date.
export function when(ms) {
  const [, local, utc] = /^(.*?)(?: \((.*)\))?$/.exec(moment(ms));
  return h("time", {}, h("span", {}, local), utc && [" ", h("span", {}, `(${utc})`)]);
}

export function clock(ms) {
  return LOCAL.format(Number(ms)).slice(11, 19);
}

export function short(ms) {
  return `${clock(ms)} ${ZONE}`;
}

export function about(ms) {
  const units = [["d", 86400000, 2], ["h", 3600000, 2], ["min", 60000, 2], ["s", 1000, 1]];
  for (const [name, of, least] of units) {
    if (ms >= least * of) return `${Math.floor(ms / of).toLocaleString("en")} ${name}`;
  }
  return `${Math.round(ms)} ms`;
}

export function counted(number, noun) {
  return `${Number(number).toLocaleString("en")} ${noun}${Number(number) === 1 ? "" : "s"}`;
}

// To three digits.
export function size(bytes) {
  for (const [unit, of] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= 0.9995 * of) return `${Number((bytes / of).toPrecision(3)).toLocaleString("en")} ${unit}`;
  }
  return counted(bytes, "byte");
}
