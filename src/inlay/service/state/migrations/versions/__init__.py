"""One step of the schema for each file, oldest first. A step that was released is never changed."""
