// A client of the Soft Memory Box in plain C, written from docs/protocol.md alone.
//
//   client HOST PORT     makes a segment, writes it, reads it back, adds to it, counts; prints what it saw
//
// The daemon is one that asks for no token (a loopback listener with --insecure). For a little-endian machine.
#include <netdb.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { HELLO = 1, BYE = 2, CREATE = 3, ADD = 11, READ = 18, WRITE = 19, ACCUMULATE = 20 };
enum { VERSION = 3, FLOAT32 = 0, STAY = 2, COUNT = 100000, CHUNK = 262144 / 4 };

static int sock;
static uint64_t number, sequence;
static uint8_t body[1 << 16], reply[1 << 21];  // the request that is being made; the last reply's body
static uint32_t used;

static void fail(const char* what) {
  fprintf(stderr, "client: %s\n", what);
  exit(1);
}

static void put(const void* value, uint32_t size) {
  memcpy(body + used, value, size);
  used += size;
}
static void put8(uint8_t value) { put(&value, 1); }
static void put16(uint16_t value) { put(&value, 2); }
static void put32(uint32_t value) { put(&value, 4); }
static void put64(uint64_t value) { put(&value, 8); }
static void put_double(double value) { put(&value, 8); }
static void put_text(const char* text) {
  put32(strlen(text));
  put(text, strlen(text));
}
static uint64_t get64(uint32_t at) {
  uint64_t value;
  memcpy(&value, reply + at, 8);
  return value;
}

static void send_all(const void* data, size_t size) {
  for (size_t sent = 0; sent < size;) {
    ssize_t more = send(sock, (const char*)data + sent, size - sent, MSG_NOSIGNAL);
    if (more <= 0) fail("the daemon is gone");
    sent += more;
  }
}
static void receive_all(void* data, size_t size) {
  for (size_t got = 0; got < size;) {
    ssize_t more = recv(sock, (char*)data + got, size - got, 0);
    if (more <= 0) fail("the daemon is gone");
    got += more;
  }
}

struct __attribute__((packed)) header {
  char magic[4];
  uint16_t operation, status;
  uint64_t number;
  uint32_t length;
};

// Sends the body made by put and behind it size bytes of elements; returns the length of the reply's body.
static uint32_t call(uint16_t operation, const void* elements, uint32_t size) {
  struct header head = {{'S', 'M', 'B', '1'}, operation, 0, ++number, used + size};
  send_all(&head, sizeof head);
  send_all(body, used);
  send_all(elements, size);
  used = 0;
  receive_all(&head, sizeof head);
  if (memcmp(head.magic, "SMB1", 4) || head.number != number) fail("no reply to my request");
  if (head.length >= sizeof reply) fail("too long a reply");
  receive_all(reply, head.length);
  reply[head.length] = 0;
  if (head.status) fail((char*)reply + 4);  // a failure's message stands behind its length
  return head.length;
}

// Writes (or adds, with a scale) all elements, one chunk a piece; returns the segment's version after it.
static uint64_t update(uint16_t operation, uint64_t segment, const float* values, double scale) {
  for (uint32_t at = 0; at < COUNT; at += CHUNK) {
    uint32_t count = COUNT - at < CHUNK ? COUNT - at : CHUNK;
    put64(segment), put64(++sequence), put64(sequence - 1), put64(at), put64(count);
    put8(at + count == COUNT);
    if (operation == ACCUMULATE) put8(FLOAT32), put_double(scale);
    call(operation, values + at, 4 * count);
  }
  return get64(0);
}

int main(int argc, char** argv) {
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
  if (argc != 3 || getaddrinfo(argv[1], argv[2], &hints, &found)) fail("usage: client HOST PORT");
  sock = socket(found->ai_family, SOCK_STREAM, 0);
  if (connect(sock, found->ai_addr, found->ai_addrlen)) fail("no daemon answers");
  freeaddrinfo(found);

  put16(VERSION), put64(0), put64(0), put64(0), put8(0), put32(getpid()), put_text("client.c");
  call(HELLO, NULL, 0);
  put_text("c/center"), put64(COUNT), put8(FLOAT32), put8(STAY), put_text("made in C");
  put8(0), put8(1), put_double(5.0);
  call(CREATE, NULL, 0);
  uint64_t segment = get64(0);

  static float values[COUNT];
  for (int i = 0; i < COUNT; i++) values[i] = i;
  printf("version %lu\n", (unsigned long)update(WRITE, segment, values, 0));
  printf("version %lu\n", (unsigned long)update(ACCUMULATE, segment, values, 0.5));
  put64(segment), put64(0), put64(COUNT);
  if (call(READ, NULL, 0) != sizeof values) fail("too few elements");
  for (int i = 0; i < COUNT; i++)
    if (((float*)reply)[i] != 1.5f * i) fail("another element than expected");
  printf("read %d elements\n", COUNT);
  for (int i = 0; i < 2; i++) {
    put_text("c/steps"), put64(5);
    call(ADD, NULL, 0);
    printf("counter %ld\n", (long)get64(0));
  }
  call(BYE, NULL, 0);
  return 0;
}
