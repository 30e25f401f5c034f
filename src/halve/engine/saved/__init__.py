"""Files with compiled networks. Reading one never runs code from it."""
