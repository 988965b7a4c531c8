// Conversations and pictures in IndexedDB; in memory where the browser has none.

let opening;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("mmjax", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      const pictures = request.result.createObjectStore("pictures", { keyPath: "id" });
      pictures.createIndex("conversation", "conversation");
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

/** Run `work` over object stores in one transaction; return its result once that is written. */
async function transact(mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(["conversations", "pictures"], mode);
    const request = work(
      transaction.objectStore("conversations"),
      transaction.objectStore("pictures"),
    );
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

/** Return all conversations, the latest first. */
export async function listConversations() {
  const all = await transact("readonly", (conversations) => conversations.getAll());
  return all.sort((one, other) => other.updated - one.updated);
}

/** Write a conversation with new pictures, `{id, blob}` each; drop those that it no longer has. */
export async function writeConversation(conversation, newPictures) {
  const isWritten = transact("readwrite", (conversations, pictures) => {
    conversations.put(conversation);
    for (const { id, blob } of newPictures) pictures.put({ id, conversation: conversation.id, blob });
    conversations.transaction.commit(); // needs no page any more, which may be left in this moment
  });
  await Promise.all([isWritten, dropPictures(conversation)]);
}

function dropPictures(conversation) {
  const kept = new Set(conversation.messages.flatMap((m) => (m.pictures ?? []).map((p) => p.id)));
  return transact("readwrite", (_, pictures) => {
    pictures.index("conversation").openKeyCursor(conversation.id).onsuccess = (event) => {
      const cursor = event.target.result;
      if (!cursor) return;
      if (!kept.has(cursor.primaryKey)) pictures.delete(cursor.primaryKey);
      cursor.continue();
    };
  });
}

/** Delete a conversation with its pictures. */
export function deleteConversation(id) {
  const isDeleted = transact("readwrite", (conversations) => {
    conversations.delete(id);
    conversations.transaction.commit();
  });
  return Promise.all([isDeleted, dropPictures({ id, messages: [] })]);
}

/** Return a conversation's pictures, `{id, blob}` each. */
export function readPictures(conversation) {
  return transact("readonly", (_, pictures) =>
    pictures.index("conversation").getAll(conversation),
  );
}
