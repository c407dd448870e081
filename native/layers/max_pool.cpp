#include "max_pool.hpp"

#include <algorithm>

#include "parallel.hpp"

namespace layers {
namespace {

constexpr size_t kBlock = 256;  // windows of a plane's row, or channels of a window, at once

#if defined(__x86_64__) && defined(__GNUC__)
#define LAYERS_SET avx512
#define LAYERS_TARGET __attribute__((target("avx512f")))
#include "max_pool_rows.hpp"
#define LAYERS_SET avx2
#define LAYERS_TARGET __attribute__((target("avx2")))
#include "max_pool_rows.hpp"
#endif
#define LAYERS_SET plain
#define LAYERS_TARGET
#include "max_pool_rows.hpp"

// One instruction set's functions.
struct Rows {
  void (*forward_last)(const float*, float*, uint8_t*, size_t, const Windows&, size_t);
  void (*backward_last)(const float*, const uint8_t*, float*, size_t, const Windows&, size_t, bool);
  void (*forward_block)(const float*, float*, uint8_t*, const Windows&, size_t, size_t, size_t);
};

Rows rows_for(Machine machine) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (machine == Machine::avx512) return {avx512::forward_last, avx512::backward_last, avx512::forward_block};
  if (machine == Machine::avx2) return {avx2::forward_last, avx2::backward_last, avx2::forward_block};
#endif
  (void)machine;
  return {plain::forward_last, plain::backward_last, plain::forward_block};
}

void forward_plane(const Rows& rows, const float* x, float* y, uint8_t* won, const Windows& w, size_t row) {
  for (size_t begin = 0; begin < w.columns; begin += kBlock) {
    rows.forward_block(x, y + begin, won == nullptr ? nullptr : won + begin, w, row, begin,
                       std::min(kBlock, w.columns - begin));
  }
}

void backward_plane(const float* dy, const uint8_t* won, float* dx, const Windows& w, const size_t* offset,
                    size_t row) {
  // Unsigned sums wrap around: a corner before the plane's begin comes back with the winner's offset.
  size_t corner = row * w.stride_h * w.width - w.pad_h * w.width - w.pad_w;
  for (size_t column = 0; column < w.columns; ++column, corner += w.stride_w) {
    dx[corner + offset[won[column]]] += dy[column];
  }
}

// Below this many values a second thread costs more than it saves.
constexpr size_t kThreadWorth = 32 * 1024;

int useful_threads(size_t values, int threads) {
  return static_cast<int>(std::clamp<size_t>(values / kThreadWorth, 1, static_cast<size_t>(std::max(threads, 1))));
}

// The planes, or the images with their channels last, as so many pieces of equal shape.
struct Lot {
  Lot(size_t batch, size_t channels, bool last, const Windows& w)
      : images(last ? batch : batch * channels), depth(last ? channels : 1), in(w.height * w.width * depth),
        line(w.columns * depth) {}
  size_t images, depth;
  size_t in, line;  // values of an image, and of a row of windows
};

// Calls body(image) for all, small ones several in a task: `in` is the values of each.
template <typename Body>
void each_image(size_t images, size_t in, int team, Body body) {
  const size_t together = std::clamp<size_t>(kThreadWorth / 2 / std::max<size_t>(in, 1), 1, images);
  run_tasks((images + together - 1) / together, team, [&](size_t task) {
    for (size_t i = task * together; i < std::min(images, (task + 1) * together); ++i) body(i);
  });
}

// Fills dx[begin, end) of `line` floats a row, and says where it has come to.
size_t clear_rows(float* dx, size_t line, size_t begin, size_t end) {
  if (begin < end) std::fill(dx + begin * line, dx + end * line, 0.0f);
  return std::max(begin, end);
}

// Whether each pixel is in one window.
bool tiles(const Windows& w) {
  return w.stride_h == w.kernel_h && w.stride_w == w.kernel_w && w.rows * w.stride_h >= w.height + w.pad_h &&
         w.columns * w.stride_w >= w.width + w.pad_w;
}

// One image, or one plane of it: rows are cleared just before a window reaches them, so that they stay cached.
template <typename Row>
void backward_rows(float* dx, size_t line, const Windows& w, Row row) {
  size_t clear = 0;
  for (size_t r = 0; r < w.rows; ++r) {
    const size_t end = r * w.stride_h + w.kernel_h;  // counted from the padding's begin
    clear = clear_rows(dx, line, clear, std::min(end - w.pad_h, w.height));
    row(r);
  }
  clear_rows(dx, line, clear, w.height);
}

}  // namespace

bool has(Machine machine) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (machine == Machine::avx512) return __builtin_cpu_supports("avx512f") != 0;
  if (machine == Machine::avx2) return __builtin_cpu_supports("avx2") != 0;
#endif
  return machine == Machine::plain;
}

Machine best_machine() {
  for (const Machine machine : {Machine::avx512, Machine::avx2}) {
    if (has(machine)) return machine;
  }
  return Machine::plain;
}

void max_pool_forward(const float* x, float* y, uint8_t* won, size_t batch, size_t channels, bool last,
                      const Windows& w, int threads) {
  const Lot lot(batch, channels, last, w);
  if (lot.images * lot.in * lot.line == 0) return;
  const Rows rows = rows_for(w.machine);
  const int team = useful_threads(lot.images * lot.in, threads);
  // Few images are cut into their rows.
  const size_t cuts = lot.images >= 4 * static_cast<size_t>(team) ? 1 : w.rows, height = w.rows / cuts;
  each_image(lot.images * cuts, lot.in / cuts, team, [&](size_t piece) {
    const size_t image = piece / cuts, first = piece % cuts * height;
    for (size_t row = first; row < first + height; ++row) {
      const size_t at = (image * w.rows + row) * lot.line;
      uint8_t* places = won == nullptr ? nullptr : won + at;
      if (last) {
        rows.forward_last(x + image * lot.in, y + at, places, channels, w, row);
      } else {
        forward_plane(rows, x + image * lot.in, y + at, places, w, row);
      }
    }
  });
}

void max_pool_backward(const float* dy, const uint8_t* won, float* dx, size_t batch, size_t channels, bool last,
                       const Windows& w, int threads) {
  const Lot lot(batch, channels, last, w);
  if (lot.images * lot.in * lot.line == 0) return;
  size_t offset[256];
  for (size_t place = 0; place < w.kernel_h * w.kernel_w; ++place) {
    offset[place] = place / w.kernel_w * w.width + place % w.kernel_w;
  }
  const Rows rows = rows_for(w.machine);
  const bool alone = last && tiles(w);
  each_image(lot.images, lot.in, useful_threads(lot.images * lot.in, threads), [&](size_t image) {
    float* to = dx + image * lot.in;
    const auto row_of = [&](size_t row) {
      const size_t at = (image * w.rows + row) * lot.line;
      if (last) {
        rows.backward_last(dy + at, won + at, to, channels, w, row, alone);
      } else {
        backward_plane(dy + at, won + at, to, w, offset, row);
      }
    };
    if (alone) {
      for (size_t row = 0; row < w.rows; ++row) row_of(row);
    } else {
      backward_rows(to, w.width * lot.depth, w, row_of);
    }
  });
}

}  // namespace layers
