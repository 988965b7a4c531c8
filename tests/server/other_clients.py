"""Ask a running server through LangChain's and LiteLLM's clients.

    pip install langchain-openai litellm
    python tests/server/other_clients.py http://127.0.0.1:8000/v1

Texts, streams, a picture and a tool, by each client.
"""

import base64
import io
import json
import sys
from typing import Any
from urllib.request import urlopen

import litellm
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from PIL import Image

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def picture_part() -> dict[str, Any]:
    """Return a red picture as a part of a message."""
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def ask_langchain(url: str, model: str) -> None:
    """Ask with LangChain."""
    chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=16, temperature=0)
    print("langchain, text:", chat.invoke("What is it?").content)
    print("langchain, stream:", "".join(str(chunk.content) for chunk in chat.stream("What is it?")))
    question = {"type": "text", "text": "What color is it?"}
    message = HumanMessage(content=[picture_part(), question])
    answer = chat.invoke([message])
    print("langchain, picture:", answer.content, answer.usage_metadata)
    responses = ChatOpenAI(
        base_url=url, api_key="none", model=model, use_responses_api=True, temperature=0
    )
    print("langchain, responses:", responses.invoke("What is it?").text)
    try:
        called = chat.bind_tools([TOOL], tool_choice="get_weather").invoke("The weather of Oslo?")
        print("langchain, tool:", called.tool_calls)
    except Exception as error:  # a model without a place for tools refuses them
        print("langchain, tool:", error)


def ask_litellm(url: str, model: str) -> None:
    """Ask with LiteLLM."""
    options: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": url,
        "api_key": "none",
        "max_tokens": 16,
    }
    text = [{"role": "user", "content": "What is it?"}]
    answer: Any = litellm.completion(messages=text, **options)
    print("litellm, text:", answer.choices[0].message.content, answer.usage.prompt_tokens)
    stream: Any = litellm.completion(messages=text, stream=True, **options)
    print("litellm, stream:", "".join(chunk.choices[0].delta.content or "" for chunk in stream))
    parts = [picture_part(), {"type": "text", "text": "What color is it?"}]
    answer = litellm.completion(messages=[{"role": "user", "content": parts}], **options)
    print("litellm, picture:", answer.choices[0].message.content)


if __name__ == "__main__":
    base_url = sys.argv[1]
    with urlopen(f"{base_url}/models") as response:
        served = json.load(response)["data"][0]["id"]
    ask_langchain(base_url, served)
    ask_litellm(base_url, served)
