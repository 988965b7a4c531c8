"""Ask any model about pictures, a page of a document or a video, in this process.

`python examples/ask.py MODEL [FILE ...] [TEXT]`, where README.md beside this file says which model
is for what. `--marks` shows an answer's special tokens, such as DocTags.
"""

import argparse
import base64
import mimetypes
from pathlib import Path
from typing import Any

from mmjax import LLM, SamplingParams


def as_part(file: str) -> dict[str, Any]:
    """Return a part of a message, of a picture's or a video's file."""
    kind = mimetypes.guess_type(file)[0] or "image/png"
    data = base64.b64encode(Path(file).read_bytes()).decode()
    name = f"{kind.partition('/')[0]}_url"  # image_url or video_url
    return {"type": name, name: {"url": f"data:{kind};base64,{data}"}}


def ask(llm: LLM, given: list[str], *, max_tokens: int = 1024, marks: bool = False) -> str:
    """Return the answer about the files among `given`; what is no file is the text."""
    parts = [as_part(x) if Path(x).is_file() else {"type": "text", "text": x} for x in given]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, skip_special_tokens=not marks)
    (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    return str(output.outputs[0].parsed or output.outputs[0].text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("given", nargs="+", metavar="FILE_OR_TEXT")
    parser.add_argument("--marks", action="store_true")
    options = parser.parse_args()
    print(ask(LLM(options.model, max_num_seqs=1), options.given, marks=options.marks))
