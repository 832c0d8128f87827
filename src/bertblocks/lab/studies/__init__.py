"""The studies that ship with BertBlocks."""
