// A clip from the microphone, as a file of the next question.

import { announce, byId } from "../dom.js";

let recorder = null;

/** Whether this browser can record here: a page of another host needs https. */
export const canRecord = () => Boolean(navigator.mediaDevices?.getUserMedia && globalThis.MediaRecorder);

/** Let the button begin and end a clip, which `take` is given as a file; `fail` gets a text. */
export function startRecorder(take, fail) {
  byId("record").addEventListener("click", async () => {
    if (recorder) {
      recorder.stop();
      return;
    }
    try {
      record(await navigator.mediaDevices.getUserMedia({ audio: true }), take);
    } catch (error) {
      show(false);
      fail(`The microphone cannot be heard: ${error.message}.`);
    }
  });
}

function record(stream, take) {
  const pieces = [];
  recorder = new MediaRecorder(stream);
  recorder.addEventListener("dataavailable", ({ data }) => pieces.push(data));
  recorder.addEventListener("stop", () => {
    // Its lights go out.
    for (const track of stream.getTracks()) track.stop();
    const [type] = recorder.mimeType.split(";");
    recorder = null;
    show(false);
    take(new File(pieces, `recording.${type.split("/")[1] ?? "webm"}`, { type }));
  });
  recorder.start();
  show(true);
  announce("Recording.");
}

function show(isRecording) {
  const name = isRecording ? "End the recording" : "Record sound";
  byId("record").ariaLabel = name;
  byId("record").title = name;
  byId("record").classList.toggle("recording", isRecording);
}
