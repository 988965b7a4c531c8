"""Stream an answer from a running server (`make serve`) with OpenAI's own client.

`python examples/streaming_client.py [http://127.0.0.1:8000/v1]`
"""

import base64
import io
import sys

from openai import OpenAI
from PIL import Image, ImageDraw

picture = Image.new("RGB", (256, 256), "white")
ImageDraw.Draw(picture).ellipse((70, 70, 180, 180), fill="green")
buffer = io.BytesIO()
picture.save(buffer, format="PNG")
data_url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = OpenAI(base_url=address, api_key="none")
    question = "What color is the circle?"
    chunks = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_url}},
                    {"type": "text", "text": question},
                ],
            }
        ],
        temperature=0.0,
        stream=True,
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
