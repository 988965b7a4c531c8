// Pictures, videos and clips from files: checked, measured, and as the server takes them.

import { el } from "../dom.js";
import { randomId } from "../conversation/tree.js";

const TAKEN = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

const KINDS = {
  image: { one: "a picture", many: "pictures", read: readPicture },
  video: { one: "a video", many: "videos", read: readVideo },
  audio: { one: "a clip", many: "sound", read: readAudio },
};

/** Return what a model takes, in words: "pictures and videos"; `takes`: whether it takes a kind. */
export function describeTaken(takes) {
  const names = Object.entries(KINDS).flatMap(([kind, { many }]) => (takes(kind) ? [many] : []));
  return new Intl.ListFormat("en").format(names);
}

/** Return `{media, problems}`: `{id, blob, name, width, height, kind}` of each file, or why not. */
export async function readMedia(files, takes) {
  const [media, problems] = [[], []];
  for (const file of files) {
    const name = file.name || "This file";
    const [type] = file.type.split("/");
    const kind = KINDS[type] ? type : "image";
    if (!takes(kind)) {
      problems.push(`${name} is ${KINDS[kind].one}, and this model takes ${describeTaken(takes)} alone.`);
      continue;
    }
    try {
      media.push(await KINDS[kind].read(file));
    } catch {
      problems.push(`${name} is no picture that this browser can read.`);
    }
  }
  return { media, problems };
}

async function readPicture(file) {
  const bitmap = await createImageBitmap(file);
  const { width, height } = bitmap;
  // Other formats, as a phone's, go as PNG.
  const blob = TAKEN.includes(file.type) ? file : await toPng(bitmap);
  bitmap.close();
  return { id: randomId(), blob, name: file.name || "picture", width, height };
}

function toPng(bitmap) {
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  return canvas.convertToBlob({ type: "image/png" });
}

/** Return a video; its size is 0 where this browser cannot play what the server may still read. */
function readVideo(file) {
  return new Promise((resolve) => {
    const address = URL.createObjectURL(file);
    const finish = () => {
      URL.revokeObjectURL(address);
      const { videoWidth: width, videoHeight: height } = video;
      resolve({ id: randomId(), blob: file, name: file.name || "video", width, height, kind: "video" });
    };
    const video = el("video", { preload: "metadata", loadedmetadata: finish, error: finish });
    video.src = address;
  });
}

/** Return a clip; whether it is one, the server will say. */
function readAudio(file) {
  return { id: randomId(), blob: file, name: file.name || "clip", width: 0, height: 0, kind: "audio" };
}

/** Return a small picture of a medium, of a video its first frame, or what plays a clip. */
export function thumbnail({ name, kind }, address, properties = {}) {
  if (kind === "audio") return el("audio", { src: address, controls: true, preload: "metadata", "aria-label": name });
  if (kind !== "video") return el("img", { src: address, alt: name, ...properties });
  const own = { src: address, preload: "metadata", muted: true, tabindex: "-1", "aria-label": name };
  return el("video", { ...own, ...properties });
}

/** Return a blob as a data URL. */
export function toDataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** Return a drawn picture, as a first one to ask about. */
export async function drawExample() {
  const canvas = new OffscreenCanvas(320, 240);
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, 320, 240);
  context.fillStyle = "red";
  context.beginPath();
  context.arc(110, 120, 60, 0, 2 * Math.PI);
  context.fill();
  context.fillStyle = "blue";
  context.fillRect(205, 75, 80, 80);
  return new File([await canvas.convertToBlob({ type: "image/png" })], "drawn.png", { type: "image/png" });
}
