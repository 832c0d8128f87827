"""The routes: OpenAI's, TEI's, Cohere's and our own, and the OpenAPI document that describes them."""
