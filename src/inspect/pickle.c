/* Owns the bytes of a pickle. Opcodes are those of Python's Lib/pickle.py.
 * Must not know what is written. */
#include <string.h>

#include "inspect/inspect.h"

enum opcode {
    PROTO = 0x80,
    STOP = '.',
    MARK = '(',
    EMPTY_DICT = '}',
    SETITEMS = 'u',
    EMPTY_LIST = ']',
    APPEND = 'a',
    TUPLE2 = 0x86,
    BININT1 = 'K',
    BININT2 = 'M',
    BININT = 'J',
    LONG1 = 0x8a,
    BINFLOAT = 'G',
    NEWTRUE = 0x88,
    NEWFALSE = 0x89,
    BINUNICODE = 'X',
    BINPUT = 'q',
    LONG_BINPUT = 'r',
    BINGET = 'h',
    LONG_BINGET = 'j'
};

static void put_byte(struct rbi_sink *sink, unsigned byte)
{
    const unsigned char one = (unsigned char)byte;
    rbi_sink_put(sink, &one, 1);
}

/* The lowest `bytes` bytes, the lowest first. */
static void put_little(struct rbi_sink *sink, uint64_t number, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        put_byte(sink, (unsigned)(number >> 8 * i) & 0xff);
}

void rbi_pickle_begin(struct rbi_sink *sink)
{
    put_byte(sink, PROTO);
    put_byte(sink, 2);
}

void rbi_pickle_end(struct rbi_sink *sink)
{
    put_byte(sink, STOP);
}

void rbi_pickle_begin_dict(struct rbi_sink *sink)
{
    put_byte(sink, EMPTY_DICT);
    put_byte(sink, MARK);
}

void rbi_pickle_end_dict(struct rbi_sink *sink)
{
    put_byte(sink, SETITEMS);
}

void rbi_pickle_list(struct rbi_sink *sink)
{
    put_byte(sink, EMPTY_LIST);
}

void rbi_pickle_append(struct rbi_sink *sink)
{
    put_byte(sink, APPEND);
}

void rbi_pickle_pair(struct rbi_sink *sink)
{
    put_byte(sink, TUPLE2);
}

void rbi_pickle_unsigned(struct rbi_sink *sink, uint64_t number)
{
    if (number <= UINT8_MAX) {
        put_byte(sink, BININT1);
        put_little(sink, number, 1);
    } else if (number <= UINT16_MAX) {
        put_byte(sink, BININT2);
        put_little(sink, number, 2);
    } else if (number <= INT32_MAX) {
        put_byte(sink, BININT);
        put_little(sink, number, 4);
    } else {
        size_t bytes = 4; /* the highest bit is the sign's */
        while (bytes < 8 && number >> (8 * bytes - 1) != 0)
            bytes++;
        const bool full = bytes == 8 && number >> 63 != 0;
        put_byte(sink, LONG1);
        put_byte(sink, (unsigned)(bytes + full));
        put_little(sink, number, bytes);
        if (full)
            put_byte(sink, 0);
    }
}

void rbi_pickle_integer(struct rbi_sink *sink, int64_t number)
{
    if (number >= 0) {
        rbi_pickle_unsigned(sink, (uint64_t)number);
    } else if (number >= INT32_MIN) {
        put_byte(sink, BININT);
        put_little(sink, (uint64_t)number, 4);
    } else {
        put_byte(sink, LONG1);
        put_byte(sink, 8);
        put_little(sink, (uint64_t)number, 8);
    }
}

void rbi_pickle_float(struct rbi_sink *sink, double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    put_byte(sink, BINFLOAT);
    for (int shift = 56; shift >= 0; shift -= 8)
        put_byte(sink, (unsigned)(bits >> shift) & 0xff);
}

void rbi_pickle_bool(struct rbi_sink *sink, bool value)
{
    put_byte(sink, value ? NEWTRUE : NEWFALSE);
}

/* How many bytes the UTF-8 character at `text` has; 0: it is none. By RFC 3629: no longer than
 * needed, no surrogates, nothing beyond U+10FFFF. */
static size_t character_bytes(const unsigned char *text)
{
    const unsigned char c = text[0];
    if (c < 0x80)
        return 1;
    const size_t bytes = c >= 0xc2 && c < 0xe0 ? 2 : (c & 0xf0) == 0xe0 ? 3 : c - 0xf0u < 5 ? 4 : 0;
    if (bytes == 0)
        return 0;
    for (size_t i = 1; i < bytes; i++)
        if ((text[i] & 0xc0) != 0x80) /* the zero byte at the end is none either */
            return 0;
    const bool wrong = (c == 0xe0 && text[1] < 0xa0) || (c == 0xed && text[1] >= 0xa0) ||
                       (c == 0xf0 && text[1] < 0x90) || (c == 0xf4 && text[1] >= 0x90);
    return wrong ? 0 : bytes;
}

void rbi_pickle_text(struct rbi_sink *sink, const char *text)
{
    const unsigned char *at = (const unsigned char *)text;
    put_byte(sink, BINUNICODE);
    put_little(sink, strlen(text), 4);
    while (*at) {
        const size_t bytes = character_bytes(at);
        if (bytes > 0)
            rbi_sink_put(sink, at, bytes);
        else
            put_byte(sink, '?');
        at += bytes > 0 ? bytes : 1;
    }
}

void rbi_pickle_keep(struct rbi_sink *sink, uint32_t number)
{
    put_byte(sink, number <= UINT8_MAX ? BINPUT : LONG_BINPUT);
    put_little(sink, number, number <= UINT8_MAX ? 1 : 4);
}

void rbi_pickle_again(struct rbi_sink *sink, uint32_t number)
{
    put_byte(sink, number <= UINT8_MAX ? BINGET : LONG_BINGET);
    put_little(sink, number, number <= UINT8_MAX ? 1 : 4);
}
