// Server-sent events by fetch, because an EventSource does not say why it is refused. Reconnects by itself.

/** Calls `take(message)` for each message and `link(state)` as the connection changes, for ever. */
export async function follow(take, link) {
  for (let pause = 500; ; pause = Math.min(8000, pause * 2)) {
    try {
      const answer = await fetch("/api/stream", { cache: "no-store" });
      if (answer.status === 401) link("locked");
      else if (!answer.ok) link("lost");
      else {
        pause = 500;
        link("live");
        await read(answer.body.getReader(), take);
        link("lost");
      }
    } catch {
      link("lost");
    }
    await new Promise((done) => setTimeout(done, pause));
  }
}

async function read(reader, take) {
  const decoder = new TextDecoder();
  let rest = "";
  let fresh = true;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
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

/** What the server knows at this address; {ok: false, error} if it says nothing. */
export async function fetched(path) {
  try {
    const answer = await fetch(path, { cache: "no-store" });
    return answer.status === 401 ? { ok: false, error: await answer.text() } : await answer.json();
  } catch {
    return { ok: false, error: "the dashboard does not answer" };
  }
}

/** Ask for something to be done; returns {ok, text | error, result}. token: where the cookie is still to be had. */
export async function post(path, body = {}, token = "") {
  const headers = { "content-type": "application/json", ...(token && { "x-everstep-token": token }) };
  try {
    const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
    return answer.status === 401 ? { ok: false, error: await answer.text() } : await answer.json();
  } catch {
    return { ok: false, error: "the dashboard does not answer" };
  }
}
