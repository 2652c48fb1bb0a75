// THE LIST of passes, with their levels.
