"""The rules of the models hold in every state or run, and each is needed."""
