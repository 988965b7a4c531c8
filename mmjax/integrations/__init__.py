"""mmjax as the engine of other frameworks: what they call, and what their weights are named."""
