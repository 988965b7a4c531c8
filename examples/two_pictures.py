"""Compare two pictures with one prompt, written out as the model reads it."""

from PIL import Image, ImageDraw

from mmjax import LLM, SamplingParams

IMAGE = "<start_of_image>"
PROMPT = f"<start_of_turn>user\n{IMAGE}{IMAGE}{{}}<end_of_turn>\n<start_of_turn>model\n"


def draw_circles(num_circles: int) -> Image.Image:
    """Return a white picture with some blue circles in a row."""
    picture = Image.new("RGB", (300, 300), "white")
    for i in range(num_circles):
        left = 20 + 95 * i
        ImageDraw.Draw(picture).ellipse((left, 110, left + 75, 185), fill="blue")
    return picture


if __name__ == "__main__":
    llm = LLM(max_num_seqs=1, use_tqdm_on_load=False)
    request = {
        "prompt": PROMPT.format("Which picture has more circles?"),
        "multi_modal_data": {"image": [draw_circles(1), draw_circles(3)]},
    }
    (output,) = llm.generate(request, SamplingParams(temperature=0.0, max_tokens=16))
    print(output.outputs[0].text)
