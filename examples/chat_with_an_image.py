"""Ask about a picture in this process: no server, no network, the model that comes with mmjax."""

from PIL import Image, ImageDraw

from mmjax import LLM, SamplingParams

picture = Image.new("RGB", (320, 240), "white")
ImageDraw.Draw(picture).ellipse((90, 60, 210, 180), fill="red")

messages = [
    {
        "role": "user",
        "content": [
            {"type": "image_pil", "image_pil": picture},
            {"type": "text", "text": "What color is the circle?"},
        ],
    }
]

if __name__ == "__main__":
    llm = LLM(max_num_seqs=1, use_tqdm_on_load=False)
    (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    print(output.outputs[0].text)
