// Calls of the page's own server, and the stream of what happens.

const OWN = { "Delaywheel-Page": "1" };

export class Refused extends Error {
  constructor(status, shape) {
    super(shape.message || shape.reason || `status ${status}`);
    this.status = status;
    this.reason = shape.reason || "";
  }
}

let whenOut = () => {};
export function onSignedOut(then) {
  whenOut = then;
}

async function answered(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...OWN, ...options.headers } });
  } catch {
    throw new Refused(0, { reason: "PAGE_AWAY", message: "the page's own process does not answer" });
  }
  if (response.ok) return response;
  const shape = await response.json().catch(() => ({}));
  const refused = new Refused(response.status, shape);
  if (response.status === 401 && path !== "api/v1/session") whenOut(refused);
  throw refused;
}

export async function post(path, request = {}) {
  return (await answered(`api/v1/${path}`, { method: "POST", body: JSON.stringify(request) })).json();
}

export function call(name, request) {
  return post(`DelayWheel/${name}`, request);
}

export async function get(path) {
  return (await answered(`api/v1/${path}`, {})).json();
}

export function signIn(token) {
  return post("session", { token });
}

export async function signOut() {
  await answered("api/v1/session", { method: "DELETE" });
}

// Calls `told(name, data)` for each event until it is aborted; begins again if the stream breaks.
export async function live(told, signal) {
  while (!signal.aborted) {
    try {
      const response = await answered("api/v1/live", { signal });
      await events(response.body.getReader(), told);
    } catch (error) {
      if (signal.aborted || error.status === 401) return;
      told("away", { reason: error.reason || "PAGE_AWAY", message: error.message });
      if (error.status === 403) return;
    }
    await new Promise((done) => setTimeout(done, 2000));
  }
}

async function events(reader, told) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const whole = rest.split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      const lines = Object.fromEntries(event.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      told(lines.event, JSON.parse(lines.data));
    }
  }
}
