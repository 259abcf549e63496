// Requests to the server. Addresses are relative, so that the page also works behind a proxy with a prefix.

import {byId} from "./dom.js";

export const WRONG_KEY = "This is not a key of this server.";

/** An answer of the server that is an error; its message is one line for people. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Send a request and return the JSON of its answer. */
export async function call(method, path, body, type) {
  return jsonOf(await respond(method, path, body, type));
}

/** Send a request and return its answer; raise a ServerError if there is none, or if it is an error. */
export async function respond(method, path, body, type = "application/json") {
  const headers = {};
  const key = storedKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = type;
  const content = body === undefined || body instanceof Blob ? body : JSON.stringify(body);
  let response;
  if (!fitsHeader(key)) {
    askForKey();
    throw new ServerError(WRONG_KEY, 401);
  }
  try {
    response = await fetch(path, {method, headers, body: content});
  } catch {
    throw new ServerError("The server does not answer; check that it is running, then try again.", 0);
  }
  if (response.status === 401) {
    askForKey();
    throw new ServerError(key ? WRONG_KEY : "Type the key of this server to go on.", 401);
  }
  if (!response.ok) {
    const value = await jsonOf(response);
    const message = value.error?.message ?? value.error ?? `The server answered with status ${response.status}.`;
    throw new ServerError(String(message), response.status);
  }
  return response;
}

const jsonOf = (response) => response.json().catch(() => ({}));

/** Return the key that was typed, if the server asks for one; it is forgotten with the tab. */
export const storedKey = () => sessionStorage.getItem("lamella-key") ?? "";

/** Return whether a header can hold a key; a request with another one cannot be sent. */
export const fitsHeader = (key) => /^[\x20-\x7e]*$/.test(key);

function askForKey() {
  byId("key-line").hidden = false;
  byId("key").focus();
}

/** Remember the key as it is typed, and report when it is complete. */
export function watchKey(changed) {
  byId("key").value = storedKey();
  byId("key").addEventListener("change", (event) => {
    sessionStorage.setItem("lamella-key", event.target.value.trim());
    changed();
  });
}
