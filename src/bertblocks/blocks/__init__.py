"""The bricks of an encoder. Each can be used alone; `get_*` factories read a config."""
