"""What a program does with its consumer besides handling: threads, pauses, events, its end."""
