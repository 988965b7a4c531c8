// A conversation's messages are a tree, of which one path is shown: a new version of a question or
// of an answer stands beside the old one, and takes nothing away.

/** Return an id; `crypto.randomUUID` is there on https and localhost alone. */
export function randomId() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(16)).join("-");
}

/** Return a conversation; `chosen` has, of each message with several after it, which one is shown. */
export function newConversation() {
  return { id: randomId(), title: "New conversation", updated: 0, messages: [], chosen: {} };
}

/** Return a conversation that was kept; earlier pages kept lists, in which each follows the last. */
export function asTree(conversation) {
  if (conversation.chosen) return conversation;
  let parent = "";
  for (const message of conversation.messages) {
    Object.assign(message, { id: randomId(), parent });
    parent = message.id;
  }
  return { ...conversation, chosen: {} };
}

/** Add a message after the one of the id `parent` ("" for none), show it, and return it. */
export function addMessage(conversation, parent, fields) {
  const message = { ...fields, id: randomId(), parent };
  conversation.messages.push(message);
  conversation.chosen[parent] = message.id;
  return message;
}

/** Take back a message that nothing follows. */
export function removeMessage(conversation, message) {
  conversation.messages.splice(conversation.messages.indexOf(message), 1);
  delete conversation.chosen[message.parent];
}

/** Return the messages that are shown. */
export function shownPath({ messages, chosen }) {
  const after = Map.groupBy(messages, ({ parent }) => parent);
  const path = [];
  for (let list = after.get(""); list; list = after.get(path.at(-1).id)) {
    path.push(list.find(({ id }) => id === chosen[list[0].parent]) ?? list.at(-1));
  }
  return path;
}

/** Return the messages from the first one to this one. */
export function pathTo({ messages }, message) {
  const byId = new Map(messages.map((one) => [one.id, one]));
  const path = [];
  for (let one = message; one; one = byId.get(one.parent)) path.unshift(one);
  return path;
}

/** Return the versions of a message, itself among them, in the order of their making. */
export function versionsOf({ messages }, { parent }) {
  return messages.filter((one) => one.parent === parent);
}

/** Return what the answer at the end of `path` is asked with: not what failed, nor what is left out. */
export function askedWith(path) {
  const answer = path.at(-1);
  const first = Math.max(0, path.findIndex(({ id }) => id === answer.from));
  return path.slice(0, -1).filter((message, place) => {
    if (place < first) return false;
    const said = message.role === "user" ? path[place + 1] : message;
    return said === answer || Boolean(said.text);
  });
}

/** Leave the oldest question and its answers out of what `message` is asked with, if there is another. */
export function leaveOutOldest(conversation, message) {
  const [, ...rest] = askedWith(pathTo(conversation, message));
  const next = rest.find(({ role }) => role === "user");
  if (next) message.from = next.id;
  return Boolean(next);
}
