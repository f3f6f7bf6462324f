"""The exchange room: tasks that leave Inlay, or come to it, in the formats of others."""
