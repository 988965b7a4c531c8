// The page: which conversation is open, and what is done to it.

import { answer, goOn, isRunning, startAnswers, stopAnswer } from "./answers.js";
import { changeDraft, draftedMedia, showAbilities, showProblem, showRunning, startComposer } from "./composer/composer.js";
import { toDataUrl } from "./composer/media.js";
import * as kept from "./conversation/kept.js";
import { addMessage, askedWith, newConversation, pathTo, removeMessage, shownPath } from "./conversation/tree.js";
import { announce, byId } from "./dom.js";
import { ServerError } from "./server/api.js";
import { chosenModel, limitOf, showLeft, startModels } from "./server/models.js";
import { openPanel } from "./server/panel.js";
import { startStatus } from "./server/status.js";
import { showVectors } from "./server/vectors.js";
import { sampling, startSettings, systemPrompt } from "./settings.js";
import { drawConversations, startSidebar } from "./sidebar.js";
import { drawGrown, drawThread, redraw, scrollToEnd, startThread } from "./thread/thread.js";

let current = newConversation();

const path = () => shownPath(current);

// ---- conversations -----------------------------------------------------------------------------

function open(conversation) {
  changeDraft(current.id, conversation.id);
  return showConversation(conversation);
}

async function showConversation(conversation) {
  current = conversation;
  kept.noteOpened(current);
  if (current.messages.length) await kept.readPicturesOf(current);
  drawAll();
  scrollToEnd();
}

function start() {
  return open(newConversation());
}

function closeDeleted(conversation) {
  conversation.messages.forEach(stopAnswer);
  if (conversation === current) start();
}

function drawAll() {
  drawConversations();
  drawThread();
  drawState();
}

/** Draw what depends on the last message. */
function drawState() {
  const shown = path();
  showRunning(isRunning(shown.at(-1)));
  const last = shown.at(-1)?.role === "assistant" ? askedWith(shown) : [];
  showLeft([...last, ...shown.slice(-1)], draftedMedia());
}

// ---- asking ------------------------------------------------------------------------------------

/** Ask at the end of what is shown; return whether it is asked. */
function ask(text, pictures) {
  if (isRunning(path().at(-1))) return false;
  return askAfter(path().at(-1)?.id ?? "", text, pictures);
}

function askAfter(parent, text, pictures) {
  const fields = fieldsAfter(parent);
  if (!fields) return false;
  if (!current.messages.length) current.title = (text || pictures[0].name).split("\n")[0].slice(0, 60);
  const question = addMessage(current, parent, { role: "user", text, pictures });
  answer(current, question.id, fields);
  return true;
}

/** Return what an answer is asked with, after the message `parent`; null where a setting is wrong. */
function fieldsAfter(parent) {
  const last = pathTo(current, current.messages.find(({ id }) => id === parent)).findLast(({ role }) => role === "assistant");
  const { from, dropsOldest } = last ?? {};
  try {
    return { system: systemPrompt(), model: chosenModel(), sampling: sampling(), from, dropsOldest };
  } catch (error) {
    showProblem(error.message);
    return null;
  }
}

/** Answer once more; `model` and `seed` stand for those that are set. */
function again(message, { model, seed, dropsOldest } = {}) {
  const fields = fieldsAfter(message.parent);
  if (!fields) return;
  if (model) fields.model = model;
  if (dropsOldest) fields.dropsOldest = true;
  if (seed !== undefined) fields.sampling.seed = seed;
  if (!message.text && message.state !== "done") removeMessage(current, message); // nothing is lost by it
  answer(current, message.parent, fields);
}

/** Return `[label, what it does]` of each way on from an answer whose prompt is more than fits. */
function waysPastLimit(message) {
  const asked = askedWith(pathTo(current, message));
  const question = asked.at(-1);
  const picture = asked.flatMap((one) => one.pictures ?? []).at(-1);
  const ways = [];
  if (asked.length > 1 || question.pictures.length > 1) {
    const label = picture ? "Ask in a new conversation, with the last picture" : "Ask in a new conversation";
    ways.push([label, () => askElsewhere(question.text, picture)]);
  }
  if (asked.length > 1) ways.push(["Leave out the oldest", () => again(message, { dropsOldest: true })]);
  return ways;
}

async function askElsewhere(text, picture) {
  const copies = picture ? [kept.copyOfPicture(picture)] : [];
  await start();
  ask(text, copies);
}

/** Throw where there are more pictures than the model takes. */
function check(messages) {
  for (const [kind, name] of [["image", "pictures"], ["video", "videos"], ["audio", "clips"]]) {
    const all = messages.flatMap((message) => message.pictures ?? []);
    const count = all.filter((medium) => (medium.kind ?? "image") === kind).length;
    const limit = limitOf(kind);
    if (limit === undefined || count <= limit) continue;
    const message = `There are ${count} ${name} to send, and this model takes ${limit} at once.`;
    throw new ServerError(0, { message, code: "too_many_pictures" });
  }
}

// ---- answers -----------------------------------------------------------------------------------

function began(conversation, message) {
  kept.save(conversation);
  if (conversation !== current) return;
  kept.noteOpened(current);
  drawAll();
  scrollToEnd();
  announce("Answering.");
}

function ended(conversation, message) {
  kept.writeDown(conversation);
  drawConversations();
  if (conversation !== current) return;
  redraw(message);
  if (message.dropsOldest) drawThread();
  drawState();
  announce(message.state === "done" ? `Answer: ${message.text}` : message.state === "stopped" ? "Stopped." : "");
}

function stop() {
  stopAnswer(path().at(-1));
}

function show(message) {
  current.chosen[message.parent] = message.id;
  drawThread();
  drawState();
  kept.writeDown(current);
}

// ---- the start ---------------------------------------------------------------------------------

async function startPage() {
  startAnswers({ began, ended, check, saved: kept.writeDown, grew: (_, message) => drawGrown(message), dataUrlOf: (id) => toDataUrl(kept.pictureOf(id).blob) });
  startSettings();
  startModels(() => {
    showAbilities();
    showVectors();
    drawState();
  });
  startComposer({ ask, stop, changed: drawState });
  startThread({ current: () => current, show, again, waysPastLimit, edit: (message, text, pictures) => askAfter(message.parent, text, pictures), goOn: (message) => goOn(current, message) });
  startSidebar({ current: () => current, open, start, deleted: closeDeleted, renamed: () => { byId("title").textContent = current.title; } });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  });
  startStatus(openPanel);
  await kept.readAll();
  await showConversation(kept.lastOpened());
  document.body.dataset.started = "true";
}

startPage();
