// The server's state in the header, looked at again and again.

import { getModels, getReady } from "./api.js";
import { byId } from "../dom.js";
import { askForKey, onKey } from "./key.js";
import { showModels } from "./models.js";

const [SOON_MS, LATER_MS, OFF_MS] = [1000, 15000, 3000];
let timer = 0;
let models = null; // until they are known, and again after the server was away

/** Show the state from now on; `openPanel` is called by a press on it. */
export function startStatus(openPanel) {
  byId("status-open").addEventListener("click", () => {
    if (byId("status").dataset.state === "key") askForKey();
    else openPanel();
  });
  onKey(look);
  look();
}

async function look() {
  let wait;
  try {
    const ready = await getReady();
    models ??= await getModels();
    wait = showReady(ready, models);
  } catch (error) {
    models = null;
    wait = showAbsent(error.status === 401);
  }
  clearTimeout(timer);
  timer = setTimeout(look, wait);
}

function showAbsent(needsKey) {
  if (needsKey) show("key", "Needs an API key");
  else show("off", "The server cannot be reached");
  return needsKey ? LATER_MS : OFF_MS;
}

function showReady({ isReady, status, num_programs_left: numLeft }, list) {
  showModels(list);
  if (!isReady) {
    const isStarting = status === "starting";
    show("busy", isStarting ? "Starting: the model is loaded and compiled" : `The engine is ${status}`);
    return SOON_MS;
  }
  show(numLeft ? "busy" : "ready", numLeft ? `Ready, ${numLeft} left to compile` : "Ready");
  return numLeft ? SOON_MS : LATER_MS;
}

function show(state, text) {
  byId("status").dataset.state = state;
  if (byId("status-text").textContent !== text) byId("status-text").textContent = text;
}
