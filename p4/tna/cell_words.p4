// How a chunk lies in the registers. A pass reads or writes one row: as many 32-bit words as there
// are registers, four to a stage, which is all that a Tofino's stateful ALUs give. A chunk is ROWS
// rows; the last is shorter, so its words come first in every row (the head).

// A row is as wide as the containers allow, which is less than a Tofino 2's registers could give; so
// there the cells are in two banks, one for each half of the slots.

#ifndef KVCAST_CELL_WORDS_P4_
#define KVCAST_CELL_WORDS_P4_

// 24 words a row; 11 rows, the last of 16. On a Tofino 1 six stages' worth.
#define HEAD_WORDS(M) \
    M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(10) M(11) M(12) M(13) M(14) M(15)
#define TAIL_WORDS(M) M(16) M(17) M(18) M(19) M(20) M(21) M(22) M(23)
#define ROWS 11
const bit<8> LAST_ROW = ROWS - 1;

#define WORD_FIELD(n) bit<32> w##n;
header row_head_h { HEAD_WORDS(WORD_FIELD) }
header row_tail_h { TAIL_WORDS(WORD_FIELD) }

#endif
