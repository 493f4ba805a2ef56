// What the headers of retries say, in words.

import { bytesOf, facts, foreign, h } from "./dom.js";
import { moment } from "./times.js";

const WORDS = [["attempt", "attempt"], ["origin", "first read at"], ["origin-timestamp", "written there"], ["first-error", "first error"],
  ["last-error", "last error"], ["root", "its way began with"]];

export function inWords(headers) {
  const said = new Map((headers ?? []).map((each) => [each.name, each.value]));
  const text = (name) => (said.get(name) == null ? null : new TextDecoder().decode(bytesOf(said.get(name))));
  const told = WORDS.map(([name, word]) => [word, text(`dw-retry-${name}`)]).filter(([, value]) => value !== null);
  if (!told.length) return null;
  return h("section", {}, h("h2", {}, "A consumer's retry"), facts(told.map(([word, value]) =>
    [word, word === "written there" && /^\d+$/.test(value) ? moment(value) : foreign(value, 1000)])));
}
