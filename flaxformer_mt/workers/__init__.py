"""Maps a function over blocks of work, with worker processes or Ray actors; survives the death of workers."""
