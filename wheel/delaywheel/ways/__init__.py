"""What a record's headers say of its message and that one's way: values, columns, roots."""
