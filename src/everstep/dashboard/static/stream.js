// Server-sent events by fetch, because an EventSource does not tell the reason of a refusal. Reconnects automatically.

const SILENT_MS = 12_000; // the server says at least every 2 s that it is there
let cut = new AbortController();
let again = false;
let heardMs = 0;

/** Calls `take(message, first)` for each message and `link(state, heardMs)` as the connection changes, for ever. heardMs:
when the server was last heard of, by our clock. query: gives the query of each new connection. */
export async function follow(take, link, query) {
  for (let pause = 500; ; pause = Math.min(8000, pause * 2)) {
    cut = new AbortController();
    try {
      const answer = await fetch(`/api/stream${query()}`, { cache: "no-store", signal: cut.signal });
      if (answer.status === 401) link("locked", heardMs);
      else if (!answer.ok) link("lost", heardMs);
      else {
        pause = 500;
        link("live", heardMs);
        await read(answer.body.getReader(), take);
        link("lost", heardMs);
      }
    } catch {
      if (!again) link("lost", heardMs);
    }
    if (!again) await new Promise((done) => setTimeout(done, pause));
    again = false;
  }
}

/** Connect again with another query. */
export function reconnect() {
  again = true;
  cut.abort();
}

async function read(reader, take) {
  const decoder = new TextDecoder();
  let rest = "";
  let fresh = true;
  for (;;) {
    const mute = cut, silence = setTimeout(() => mute.abort(), SILENT_MS);
    const { value, done } = await reader.read().finally(() => clearTimeout(silence));
    if (done) return;
    heardMs = Date.now();
    rest += decoder.decode(value, { stream: true });
    for (let cut; (cut = rest.indexOf("\n\n")) >= 0; rest = rest.slice(cut + 2)) {
      const line = rest.slice(0, cut);
      if (!line.startsWith("data: ")) continue;
      take(JSON.parse(line.slice(6)), fresh);
      fresh = false;
    }
  }
}

/** Whether this browser has the token, as a cookie. */
export async function known() {
  try {
    const answer = await fetch("/api/token", { cache: "no-store" });
    return answer.ok && (await answer.json()).ok;
  } catch {
    return false;
  }
}

/** The server's answer at this address; {ok: false, error} if there is none. */
export async function fetched(path) {
  try {
    const answer = await fetch(path, { cache: "no-store" });
    return answer.status === 401 ? { ok: false, error: await answer.text() } : await answer.json();
  } catch {
    return { ok: false, error: "the dashboard does not answer" };
  }
}

/** Request an action; returns {ok, text | error, result}. token: needed until there is a cookie. */
export async function post(path, body = {}, token = "") {
  const headers = { "content-type": "application/json", ...(token && { "x-everstep-token": token }) };
  try {
    const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
    return answer.status === 401 ? { ok: false, error: await answer.text() } : await answer.json();
  } catch {
    return { ok: false, error: "the dashboard does not answer" };
  }
}
