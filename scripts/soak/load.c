// Load for a daemon that asks for no token: many clients in one process, so that the generator is not the limit.
//
//   load HOST PORT read IDLE ACTIVE SECONDS   every active client reads 4 KiB again and again, idle ones only live
//   load HOST PORT churn COUNT                COUNT clients come and go, every other one without a word
//
// Prints one JSON object. The frames are those of docs/protocol.md.
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HELLO = 1, BYE = 2, ATTACH = 5, READ = 18, ACKNOWLEDGE = 25 };  // VERSION comes from the compiler's command
enum { COUNT = 1024, SLOTS = 1000000, SEGMENT_COUNT = 1 << 20 };  // elements of a read; microseconds; elements

struct __attribute__((packed)) header {
  char magic[4];
  uint16_t operation, status;
  uint64_t number;
  uint32_t length;
};
struct client {
  int sock;
  uint64_t number, segment;
  double asked;
  size_t got, wanted;  // bytes of the reply, header included
  uint8_t reply[sizeof(struct header) + 4 * COUNT + 1];
};

static struct sockaddr_storage where;
static socklen_t where_size;
static uint32_t latencies[SLOTS + 1];
static uint64_t errors;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void fail(const char* what) {
  fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
  exit(1);
}

static void ask(struct client* c, uint16_t operation, const void* body, uint32_t size) {
  uint8_t frame[256];
  struct header head = {{'S', 'M', 'B', '1'}, operation, 0, ++c->number, size};
  memcpy(frame, &head, sizeof head);
  memcpy(frame + sizeof head, body, size);
  c->got = 0;
  c->wanted = sizeof head;
  if (send(c->sock, frame, sizeof head + size, MSG_NOSIGNAL) != (ssize_t)(sizeof head + size)) fail("send");
}

// Takes what has come of the reply, the only one under way; true when it is whole.
static int take(struct client* c, int flags) {
  while (c->got < c->wanted) {
    const ssize_t more = recv(c->sock, c->reply + c->got, sizeof c->reply - 1 - c->got, flags);
    if (more < 0 && errno == EAGAIN) return 0;
    if (more <= 0) fail("the daemon is gone");
    const uint32_t had = c->got;
    c->got += more;
    if (had < sizeof(struct header) && c->got >= sizeof(struct header)) {
      const struct header* head = (const struct header*)c->reply;
      if (head->length > 4 * COUNT || head->number != c->number) fail("no reply to this request");
      c->wanted += head->length;
    }
    if (c->got > c->wanted) fail("more than the reply");
  }
  errors += ((const struct header*)c->reply)->status != 0;
  return 1;
}

static void call(struct client* c, uint16_t operation, const void* body, uint32_t size) {
  const uint64_t before = errors;
  ask(c, operation, body, size);
  take(c, 0);
  c->reply[c->wanted] = 0;
  if (errors != before) fail((const char*)c->reply + sizeof(struct header) + 4);
}

static void join(struct client* c) {
  const int one = 1;
  uint8_t hello[35] = {VERSION};  // session, secret, stream and mapped are 0; then a pid and an empty name
  const uint32_t pid = getpid();
  c->sock = socket(where.ss_family, SOCK_STREAM, 0);
  if (c->sock < 0 || connect(c->sock, (struct sockaddr*)&where, where_size)) fail("connect");
  setsockopt(c->sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  setsockopt(c->sock, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);  // as the box's own clients do
  memcpy(hello + 27, &pid, 4);
  call(c, HELLO, hello, sizeof hello);
}

static void attach(struct client* c) {
  const uint8_t body[] = {4, 0, 0, 0, 'l', 'o', 'a', 'd', 1, 0, 0, 0, 0, 0};  // key, readonly, compare, meta
  call(c, ATTACH, body, sizeof body);
  memcpy(&c->segment, c->reply + sizeof(struct header), 8);
}

static void ask_read(struct client* c) {
  uint64_t body[3] = {c->segment, (uint64_t)(rand() % (SEGMENT_COUNT / COUNT)) * COUNT, COUNT};
  ask(c, READ, body, sizeof body);
  c->asked = now();
}

static double percentile(uint64_t reads, double part) {
  uint64_t seen = 0;
  for (int i = 0; i <= SLOTS; i++)
    if ((seen += latencies[i]) >= part * reads) return i / 1e3;
  return SLOTS / 1e3;
}

static void read_all(int idle, int active, double seconds) {
  struct client* clients = calloc(idle + active, sizeof *clients);
  struct epoll_event events[64], event = {.events = EPOLLIN};
  const int poll = epoll_create1(0);
  for (int i = 0; i < idle + active; i++) {
    join(&clients[i]);
    attach(&clients[i]);
    if (i < active) {
      event.data.ptr = &clients[i];
      epoll_ctl(poll, EPOLL_CTL_ADD, clients[i].sock, &event);
    }
  }
  const double start = now();
  double nudge = start + 1;
  uint64_t reads = 0;
  for (int i = 0; i < active; i++) ask_read(&clients[i]);
  for (double t = start; t < start + seconds; t = now()) {
    const int ready = epoll_wait(poll, events, 64, 100);
    for (int i = 0; i < ready; i++) {
      struct client* c = events[i].data.ptr;
      if (!take(c, MSG_DONTWAIT)) continue;
      const double us = 1e6 * (now() - c->asked);
      latencies[us < SLOTS ? (int)us : SLOTS]++;
      reads++;
      ask_read(c);
    }
    if (t > nudge) {  // a sign of life of each idle client
      const uint64_t nothing = 0;
      for (int i = active; i < idle + active; i++) call(&clients[i], ACKNOWLEDGE, &nothing, sizeof nothing);
      nudge = t + 1;
    }
  }
  const double took = now() - start;
  printf("{\"reads\": %lu, \"per_second\": %.0f, \"p50_ms\": %.3f, \"p99_ms\": %.3f, \"worst_ms\": %.3f, \"errors\": %lu}\n",
         (unsigned long)reads, reads / took, percentile(reads, 0.5), percentile(reads, 0.99), percentile(reads, 1),
         (unsigned long)errors);
}

static void churn(int count) {
  const double start = now();
  for (int i = 0; i < count; i++) {
    struct client c = {0};
    join(&c);
    attach(&c);
    if (i % 2) call(&c, BYE, "", 0);
    close(c.sock);
  }
  printf("{\"connects\": %d, \"per_second\": %.0f, \"errors\": %lu}\n", count, count / (now() - start),
         (unsigned long)errors);
}

int main(int argc, char** argv) {
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
  if (argc < 5 || getaddrinfo(argv[1], argv[2], &hints, &found)) fail("usage");
  memcpy(&where, found->ai_addr, where_size = found->ai_addrlen);
  freeaddrinfo(found);
  if (!strcmp(argv[3], "churn")) churn(atoi(argv[4]));
  else if (argc == 7) read_all(atoi(argv[4]), atoi(argv[5]), atof(argv[6]));
  return 0;
}
