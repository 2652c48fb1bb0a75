// How the program's memory comes and goes.
#pragma once

namespace whale {

// Before work that takes megabytes in small blocks and gives them back, again and again: that the C library keeps them
// between. glibc hands the end of its heap back to the system beyond a threshold, twice the largest block that had a
// mapping of its own and was freed; estimates then fault the same pages in each time, a tenth of what they take. This
// takes such a block, untouched, and frees it. Elsewhere it does nothing of note.
void keep_heap();

}  // namespace whale
