// Threads that do everything to one segment at once; built under a sanitizer (tests/native, scripts/soak).
//
//     segment_stress SECONDS [--plant race|overrun|shift]
//
// Every thread draws operations by chance: exchange, accumulate (from memory and from another segment), write
// and read of whole chunks, vector operations, repair, waiting for a version. The last chunks take exchanges only and are checked
// for conservation at the end; chunk 0 takes writes of one value only and is checked in every read. --plant does
// one forbidden thing on purpose, so that a sanitizer that sees nothing is noticed: an update without the
// lock, a read past the end of an array, a shift by too much.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "smb/kernels.hpp"
#include "smb/operations.hpp"
#include "smb/vectors.hpp"

namespace {

constexpr size_t kChunks = 7;
constexpr size_t kPerChunk = smb::kChunkBytes / sizeof(float);
constexpr size_t kThreads = 6;
constexpr size_t kSum = 3;  // from here on only exchanges touch the chunks
constexpr size_t kSummed = (kChunks - kSum) * kPerChunk;

std::atomic<bool> stop{false};
std::atomic<bool> failed{false};
std::atomic<uint64_t> operations{0};

int memory_file(size_t bytes) {
  const int fd = memfd_create("stress", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>((bytes + 4095) / 4096 * 4096)) != 0) std::abort();
  return fd;
}

smb::Region make_region() {
  const size_t bytes = kChunks * smb::kChunkBytes;
  return smb::Region(memory_file(smb::Region::control_bytes(bytes)), memory_file(bytes), bytes, sizeof(float), false);
}

bool patient(size_t, uint32_t, double seconds) { return seconds < 60; }

void must(const smb::Outcome& outcome) {
  if (outcome.kind == smb::Outcome::done) return;
  std::fprintf(stderr, "an operation ended with %d at chunk %zu\n", outcome.kind, outcome.chunk);
  failed = stop = true;
}

// What one thread does; x is its own weights for the exchanged chunks.
class Worker {
 public:
  Worker(const smb::Region& center, const smb::Region& delta, unsigned seed)
      : x(kSummed, static_cast<float>(seed)), center_(center), delta_(delta), dice_(seed), buffer_(2 * kChunks * kPerChunk) {}

  void run() {
    while (!stop.load()) {
      one_operation(dice_() % 11);
      operations.fetch_add(1, std::memory_order_relaxed);
    }
  }

  std::vector<float> x;

 private:
  void one_operation(unsigned which) {
    const size_t threads = 1 + dice_() % 2;
    if (which < 2) {
      smb::ExchangePass pass(center_, kSum * kPerChunk, kSummed, x.data(), 0.3f);
      must(smb::run_pass(pass, threads, patient));
    } else if (which == 2) {
      std::fill(buffer_.begin(), buffer_.end(), 1.0f);
      smb::AccumulatePass pass(center_, kPerChunk, 2 * kPerChunk, buffer_.data(), 0.5f);
      must(smb::run_pass(pass, threads, patient));
    } else if (which == 3) {
      smb::AccumulateSegmentPass pass(center_, kPerChunk, kPerChunk, delta_, 0.5f);
      must(smb::run_pass(pass, threads, patient));
    } else if (which == 4) {
      std::fill(buffer_.begin(), buffer_.begin() + kPerChunk, static_cast<float>(dice_() % 1000));
      smb::WritePass pass(dice_() % 2 ? center_ : delta_, 0, kPerChunk, buffer_.data());
      must(smb::run_pass(pass, threads, patient));
    } else if (which == 5) {
      read_all(threads);
    } else if (which == 6) {
      center_.count_update();
      smb::repair(center_, [](uint32_t tid) { return !smb::thread_exists(tid); });
    } else if (which == 7) {
      combine(threads);
    } else if (which == 8) {
      smb::SumPass pass(center_, dice_() % 2 ? &delta_ : &center_, kChunks * kPerChunk);
      must(smb::run_pass(pass, threads, patient));
    } else if (which == 9) {
      smb::ReadPass pass(center_, 0, kChunks * kPerChunk, buffer_.data());
      pass.spread({1, 2}, kPerChunk);  // every second chunk of the buffer, the last one to its end
      must(smb::run_pass(pass, threads, patient));
    } else {
      center_.await_version(center_.head().version.load() + 1, 1000000);
    }
  }

  // Chunks 1 and 2, which hold what comes.
  void combine(size_t threads) {
    smb::ScalePass scale(center_, kPerChunk, 2 * kPerChunk, 0.5f);
    smb::FillPass fill(center_, kPerChunk + 7, kPerChunk, 1.0f);
    smb::CopySegmentPass copy(center_, kPerChunk / 2 + kPerChunk, kPerChunk, delta_);
    smb::Pass* const passes[] = {&scale, &fill, &copy};
    must(smb::run_pass(*passes[dice_() % 3], threads, patient));
  }

  void read_all(size_t threads) {
    smb::ReadPass pass(center_, 0, kChunks * kPerChunk, buffer_.data());
    must(smb::run_pass(pass, threads, patient));
    for (size_t i = 1; i < kPerChunk; ++i) {
      if (buffer_[i] == buffer_[0]) continue;
      std::fprintf(stderr, "a read mixed two writes: element %zu is %g, element 0 %g\n", i, buffer_[i], buffer_[0]);
      failed = stop = true;
      return;
    }
  }

  const smb::Region& center_;
  const smb::Region& delta_;
  std::mt19937 dice_;
  std::vector<float> buffer_;
};

void plant(const std::string& fault, const smb::Region& center) {
  if (fault == "race") {
    const std::vector<float> ones(kPerChunk, 1.0f);
    float* unlocked = reinterpret_cast<float*>(center.at(kPerChunk));
    while (!stop.load()) smb::accumulate_f32(unlocked, ones.data(), 1.0f, kPerChunk);
  } else if (fault == "overrun") {
    const std::vector<float> tight(1000, 1.0f);
    std::vector<float> target(1001);
    smb::accumulate_f32(target.data(), tight.data(), 1.0f, tight.size() + 1);
  } else if (fault == "shift") {
    volatile int by = 40;
    std::printf("%d\n", 1 << by);
  }
}

bool conserved(const smb::Region& center, const std::vector<Worker>& workers) {
  const float* chunk = reinterpret_cast<const float*>(center.at(kSum * kPerChunk));
  for (size_t i = 0; i < kSummed; ++i) {
    double sum = chunk[i], expected = 0;
    for (size_t w = 0; w < workers.size(); ++w) {
      sum += workers[w].x[i];
      expected += static_cast<double>(w + 1);
    }
    if (std::fabs(sum - expected) < 1e-2) continue;
    std::fprintf(stderr, "element %zu: weights sum up to %.6f, %.6f expected\n", i, sum, expected);
    return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1.0;
  const std::string fault = argc > 3 && std::strcmp(argv[2], "--plant") == 0 ? argv[3] : "";
  const smb::Region center = make_region(), delta = make_region();
  center.prefault(2, false);
  std::vector<Worker> workers;
  for (unsigned i = 1; i <= kThreads; ++i) workers.emplace_back(center, delta, i);
  std::vector<std::thread> threads;
  for (Worker& worker : workers) threads.emplace_back([&worker] { worker.run(); });
  std::thread saboteur([&] { plant(fault, center); });
  const int64_t end = smb::monotonic_ns() + static_cast<int64_t>(seconds * 1e9);
  while (!stop.load() && smb::monotonic_ns() < end) usleep(10000);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  saboteur.join();
  if (failed || !conserved(center, workers)) return 1;
  std::printf("%llu operations, all held\n", static_cast<unsigned long long>(operations.load()));
  return 0;
}
