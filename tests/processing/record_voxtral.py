"""Write `voxtral_conversations.json` anew: the ids that `mistral-common` 1.13 makes of each.

`pip install 'mistral-common[audio]'` in an environment of its own, where mmjax need not be:
`python tests/processing/record_voxtral.py TEKKEN`, TEKKEN being the tekken.json that
`tests.families.voxtral.make_tekken` makes.
"""

import base64
import io
import json
import sys
import wave
from importlib import import_module
from pathlib import Path
from typing import Any

CONVERSATIONS = Path(__file__).with_name("voxtral_conversations.json")


def write_silence(num_samples: int) -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(bytes(2 * num_samples))
    return base64.b64encode(file.getvalue()).decode()


def encode(tokenizer: Any, case: dict[str, Any]) -> list[int]:
    protocol = "mistral_common.protocol"
    if "transcription" in case:
        audio = write_silence(case["transcription"])
        module = import_module(f"{protocol}.transcription.request")
        request = module.TranscriptionRequest(audio=audio, language=case["language"])
        return tokenizer.encode_transcription(request).tokens
    messages = json.loads(json.dumps(case["messages"]))
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "audio":
                data = write_silence(part.pop("samples"))
                part |= {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    module = import_module(f"{protocol}.instruct.request")
    request = module.ChatCompletionRequest.from_openai(messages, tools=case.get("tools"))
    return tokenizer.encode_chat_completion(request).tokens


def main(tekken: str) -> None:
    module = import_module("mistral_common.tokens.tokenizers.mistral")
    tokenizer = module.MistralTokenizer.from_file(tekken)
    cases = json.loads(CONVERSATIONS.read_text())
    rows = [json.dumps({**case, "ids": encode(tokenizer, case)}) for case in cases]
    CONVERSATIONS.write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
