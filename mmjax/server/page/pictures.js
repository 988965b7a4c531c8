// Pictures from files: checked, measured, and as the server takes them.

const TAKEN = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

/** Return `{id, blob, name, width, height}` of each file; `refuse` is told of the others. */
export async function readPictures(files, refuse) {
  const pictures = [];
  for (const file of files) {
    try {
      pictures.push(await readPicture(file));
    } catch {
      refuse(`${file.name || "This file"} is no picture that this browser can read.`);
    }
  }
  return pictures;
}

async function readPicture(file) {
  const bitmap = await createImageBitmap(file);
  const { width, height } = bitmap;
  // Other formats, as a phone's, go as PNG.
  const blob = TAKEN.includes(file.type) ? file : await toPng(bitmap);
  bitmap.close();
  return { id: crypto.randomUUID?.() ?? randomId(), blob, name: file.name || "picture", width, height };
}

function toPng(bitmap) {
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  return canvas.convertToBlob({ type: "image/png" });
}

/** Return an id; `crypto.randomUUID` is there on https and localhost alone. */
export function randomId() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(16)).join("-");
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
