#include "lrn.hpp"

#include <algorithm>
#include <vector>

#include "parallel.hpp"
#include "rows.hpp"

namespace layers {
namespace {

// Floats of one channel that a task handles: its window sums, its ring of earlier rows and the rows that it
// reads and writes stay in the first two cache levels.
constexpr size_t kBlock = 512;
// Below this many elements a second thread costs more than it saves.
constexpr size_t kThreadWorth = 32 * 1024;

int useful_threads(size_t elements, int threads) {
  return static_cast<int>(std::clamp<size_t>(elements / kThreadWorth, 1, static_cast<size_t>(std::max(threads, 1))));
}

// One pass over the channels of a column of `n` positions; rows of a channel lie `stride` floats apart.
class Column {
 public:
  Column(size_t channels, size_t stride, size_t n, const Lrn& lrn)
      : channels_(channels), stride_(stride), n_(n), lrn_(lrn), half_(std::min(lrn.half, channels - 1)), sum_(n) {}

  void forward(const float* x, float* y) {
    start(x);
    for (size_t c = 0; c < channels_; ++c) {
      slide(x, c);
      row_normalise(y + c * stride_, x + c * stride_, sum_.data(), n_, lrn_);
    }
  }

  // The ratio of channel j is needed half_ channels later: `ratios` holds the last window of them, `directs`
  // the products that wait for their own window to fill.
  void backward(const float* x, const float* dy, float* dx) {
    const size_t window = 2 * half_ + 1, waiting = half_ + 1;
    std::vector<float> ratios(window * n_), directs(waiting * n_);
    std::vector<double> ratio_sum(n_);
    const float factor = 2.0f * lrn_.alpha * lrn_.beta;
    start(x);
    for (size_t j = 0; j < channels_ + half_; ++j) {
      float* ratio = ratios.data() + (j % window) * n_;
      if (j >= window) row_leave(ratio_sum.data(), ratio, n_);
      if (j < channels_) {
        slide(x, j);
        row_gradient(directs.data() + (j % waiting) * n_, ratio, x + j * stride_, dy + j * stride_, sum_.data(),
                     n_, lrn_);
        row_enter(ratio_sum.data(), ratio, n_);
      }
      if (j >= half_) {
        const size_t c = j - half_;
        row_combine(dx + c * stride_, directs.data() + (c % waiting) * n_, x + c * stride_, ratio_sum.data(), factor,
                    n_);
      }
    }
  }

 private:
  // The window of channel -1, so that slide(0) makes the window of channel 0.
  void start(const float* x) {
    std::fill(sum_.begin(), sum_.end(), 0.0);
    for (size_t c = 0; c < half_; ++c) row_enter_square(sum_.data(), x + c * stride_, n_);
  }

  // From the window of channel c-1 to that of channel c.
  void slide(const float* x, size_t c) {
    const bool enters = c + half_ < channels_, leaves = c > half_;
    if (enters && leaves) {
      row_slide_square(sum_.data(), x + (c + half_) * stride_, x + (c - half_ - 1) * stride_, n_);
    } else if (enters) {
      row_enter_square(sum_.data(), x + (c + half_) * stride_, n_);
    } else if (leaves) {
      row_leave_square(sum_.data(), x + (c - half_ - 1) * stride_, n_);
    }
  }

  const size_t channels_, stride_, n_;
  const Lrn& lrn_;
  const size_t half_;
  std::vector<double> sum_;
};

// Cuts (batch, area) into blocks of columns of about equal width and calls body(offset, width) for each.
template <typename Body>
void each_column(size_t batch, size_t channels, size_t area, int threads, Body body) {
  const size_t blocks = (area + kBlock - 1) / kBlock;
  const size_t width = (area + blocks - 1) / blocks;
  run_tasks(batch * blocks, useful_threads(batch * channels * area, threads), [&](size_t task) {
    const size_t begin = (task % blocks) * width;
    if (begin >= area) return;
    body(task / blocks * channels * area + begin, std::min(width, area - begin));
  });
}

// Sums over square windows of one plane: rows slide down the plane, then each row is summed sideways.
class Plane {
 public:
  Plane(size_t height, size_t width, size_t half)
      : height_(height), width_(width), rows_(std::min(half, height - 1)), columns_(std::min(half, width - 1)),
        column_sum_(width), padded_(width + 2 * columns_) {}

  // out[h, w] = sum over the window of value(row)[w]; enter and leave add or take one row of the plane.
  template <typename Enter, typename Leave>
  void box(double* out, Enter enter, Leave leave) {
    std::fill(column_sum_.begin(), column_sum_.end(), 0.0);
    for (size_t h = 0; h < rows_; ++h) enter(column_sum_.data(), h);
    for (size_t h = 0; h < height_; ++h) {
      if (h + rows_ < height_) enter(column_sum_.data(), h + rows_);
      if (h > rows_) leave(column_sum_.data(), h - rows_ - 1);
      std::copy(column_sum_.begin(), column_sum_.end(), padded_.begin() + static_cast<ptrdiff_t>(columns_));
      row_window(out + h * width_, padded_.data(), width_, 2 * columns_ + 1);
    }
  }

 private:
  const size_t height_, width_, rows_, columns_;
  std::vector<double> column_sum_;
  std::vector<double> padded_;  // zero at both ends
};

void box_of_squares(Plane& plane, double* sum, const float* x, size_t width) {
  plane.box(
      sum, [&](double* acc, size_t h) { row_enter_square(acc, x + h * width, width); },
      [&](double* acc, size_t h) { row_leave_square(acc, x + h * width, width); });
}

}  // namespace

void lrn_across_forward(const float* x, float* y, size_t batch, size_t channels, size_t area, const Lrn& lrn,
                        int threads) {
  if (batch * channels * area == 0) return;
  each_column(batch, channels, area, threads,
              [&](size_t at, size_t n) { Column(channels, area, n, lrn).forward(x + at, y + at); });
}

void lrn_across_backward(const float* x, const float* dy, float* dx, size_t batch, size_t channels, size_t area,
                         const Lrn& lrn, int threads) {
  if (batch * channels * area == 0) return;
  each_column(batch, channels, area, threads,
              [&](size_t at, size_t n) { Column(channels, area, n, lrn).backward(x + at, dy + at, dx + at); });
}

void lrn_within_forward(const float* x, float* y, size_t planes, size_t height, size_t width, const Lrn& lrn,
                        int threads) {
  const size_t area = height * width;
  if (planes * area == 0) return;
  run_tasks(planes, useful_threads(planes * area, threads), [&](size_t p) {
    Plane plane(height, width, lrn.half);
    std::vector<double> sum(area);
    box_of_squares(plane, sum.data(), x + p * area, width);
    row_normalise(y + p * area, x + p * area, sum.data(), area, lrn);
  });
}

void lrn_within_backward(const float* x, const float* dy, float* dx, size_t planes, size_t height, size_t width,
                         const Lrn& lrn, int threads) {
  const size_t area = height * width;
  if (planes * area == 0) return;
  const float factor = 2.0f * lrn.alpha * lrn.beta;
  run_tasks(planes, useful_threads(planes * area, threads), [&](size_t p) {
    Plane plane(height, width, lrn.half);
    std::vector<double> sum(area);
    std::vector<float> direct(area), ratio(area);
    box_of_squares(plane, sum.data(), x + p * area, width);
    row_gradient(direct.data(), ratio.data(), x + p * area, dy + p * area, sum.data(), area, lrn);
    plane.box(
        sum.data(), [&](double* acc, size_t h) { row_enter(acc, ratio.data() + h * width, width); },
        [&](double* acc, size_t h) { row_leave(acc, ratio.data() + h * width, width); });
    row_combine(dx + p * area, direct.data(), x + p * area, sum.data(), factor, area);
  });
}

}  // namespace layers
