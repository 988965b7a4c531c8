"""HTTP: OpenAI's routes and errors over one engine process."""

from mmjax.server.start import make_app

__all__ = ["make_app"]
