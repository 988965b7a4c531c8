// The API key, which a server may need. It is kept in this browser.

import { byId } from "../dom.js";

const NAME = "mmjax.key";
const listeners = [];
let asking = null; // a promise while the dialog is open

/** Return the key; "" for none. */
export const apiKey = () => localStorage.getItem(NAME) ?? "";

/** Call `listener` whenever the key has changed. */
export function onKey(listener) {
  listeners.push(listener);
}

/** Take a key. */
export function setKey(text) {
  localStorage.setItem(NAME, text.trim());
  listeners.forEach((listener) => listener());
}

/** Ask the person for the key that the server needs, in one dialog for all requests that wait. */
export function askForKey() {
  asking ??= new Promise((resolve) => {
    const [dialog, box] = [byId("key"), byId("key-box")];
    const hadKey = Boolean(apiKey());
    byId("key-error").textContent = hadKey ? "The server does not take the key that is kept here." : "";
    byId("key-error").hidden = !hadKey;
    box.toggleAttribute("aria-invalid", hadKey);
    box.value = "";
    dialog.returnValue = "";
    byId("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      asking = null;
      const isGiven = dialog.returnValue === "given" && Boolean(box.value.trim());
      if (isGiven) setKey(box.value);
      resolve(isGiven);
    };
    dialog.showModal();
    box.focus();
  });
  return asking;
}
