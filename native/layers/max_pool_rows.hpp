// The rows of max pooling for one instruction set: max_pool.cpp includes this once for each, with LAYERS_SET the
// name of the namespace and LAYERS_TARGET the attribute that selects it. The compiler's own vectors are split for
// the selected set as soon as they are read, so that clones made later would all have those of the plain machine.
// Nothing here calls a function that other files share: the linker may take any file's copy.

#define LAYERS_INLINE inline LAYERS_TARGET __attribute__((always_inline))
#define LAYERS_LAMBDA LAYERS_TARGET __attribute__((always_inline))

namespace LAYERS_SET {

// N values side by side.
template <int N>
struct Lanes {
  typedef float Floats __attribute__((vector_size(N * sizeof(float))));
  typedef int32_t Ints __attribute__((vector_size(N * sizeof(int32_t))));
  typedef uint8_t Bytes __attribute__((vector_size(N)));
};

// What one window covers on one axis: its places [first, first + count) lie in the image, from pixel `pixel` on.
struct Span {
  size_t first, count, pixel;
};

LAYERS_INLINE Span span(size_t index, size_t stride, size_t pad, size_t kernel, size_t size) {
  const size_t start = index * stride;  // counted from the padding's begin
  const size_t first = start < pad ? pad - start : 0, rest = size + pad - start;
  return {first, (kernel < rest ? kernel : rest) - first, start + first - pad};
}

// Channels last ------------------------------------------------------------------------------------------------

// A window's part in the image. `place` is that of its first pixel.
struct Part {
  size_t rows, columns;
  size_t row_step, column_step;  // in floats
  int32_t place, kernel_w;
};

template <int N>
LAYERS_INLINE void take_greatest(const float* x, float* y, uint8_t* won, const Part& part) {
  typename Lanes<N>::Floats best, value;
  __builtin_memcpy(&best, x, sizeof best);
  typename Lanes<N>::Ints places = typename Lanes<N>::Ints{} + part.place;
  for (size_t i = 0; i < part.rows; ++i) {
    const int32_t row = part.place + static_cast<int32_t>(i) * part.kernel_w;
    for (size_t j = i == 0 ? 1 : 0; j < part.columns; ++j) {
      __builtin_memcpy(&value, x + i * part.row_step + j * part.column_step, sizeof value);
      const typename Lanes<N>::Ints better = (value > best) | (value != value);
      best = better ? value : best;
      places = better ? typename Lanes<N>::Ints{} + (row + static_cast<int32_t>(j)) : places;
    }
  }
  __builtin_memcpy(y, &best, sizeof best);
  if (won == nullptr) return;
  const typename Lanes<N>::Bytes bytes = __builtin_convertvector(places, typename Lanes<N>::Bytes);
  __builtin_memcpy(won, &bytes, sizeof bytes);
}

// The first `skip` channels were given before. Alone: no other window has these pixels, and they hold nothing yet.
template <int N, bool alone>
LAYERS_INLINE void give_winners(const float* dy, const int32_t* won, float* dx, const Part& part, size_t skip) {
  typename Lanes<N>::Floats gradient, sum;
  typename Lanes<N>::Ints places;
  __builtin_memcpy(&gradient, dy, sizeof gradient);
  __builtin_memcpy(&places, won, sizeof places);
  if (!alone && skip > 0) {
    typename Lanes<N>::Ints lanes{};
    for (int lane = 0; lane < N; ++lane) lanes[lane] = lane;
    places = lanes < static_cast<int32_t>(skip) ? typename Lanes<N>::Ints{} - 1 : places;
  }
  for (size_t i = 0; i < part.rows; ++i) {
    const int32_t row = part.place + static_cast<int32_t>(i) * part.kernel_w;
    for (size_t j = 0; j < part.columns; ++j) {
      float* at = dx + i * part.row_step + j * part.column_step;
      const auto given = places == row + static_cast<int32_t>(j) ? gradient : typename Lanes<N>::Floats{};
      if (alone) {
        sum = given;
      } else {
        __builtin_memcpy(&sum, at, sizeof sum);
        sum += given;
      }
      __builtin_memcpy(at, &sum, sizeof sum);
    }
  }
}

// Calls window(part, corner, top) for each window of a row: offsets of its first pixel, and of its top.
template <typename Window>
LAYERS_INLINE void each_window(size_t channels, const Windows& w, size_t row, const Window& window) {
  const Span v = span(row, w.stride_h, w.pad_h, w.kernel_h, w.height);
  const size_t line = w.width * channels;
  for (size_t column = 0; column < w.columns; ++column) {
    const Span h = span(column, w.stride_w, w.pad_w, w.kernel_w, w.width);
    const Part part{v.count, h.count, line, channels, static_cast<int32_t>(v.first * w.kernel_w + h.first),
                    static_cast<int32_t>(w.kernel_w)};
    window(part, v.pixel * line + h.pixel * channels, column * channels);
  }
}

// Channels go N at a time; the last N may begin among those done before.
template <int N>
LAYERS_INLINE void forward_lanes(const float* x, float* y, uint8_t* won, size_t channels, const Part& part) {
  for (size_t done = 0; done < channels; done += N) {
    const size_t c = done + N > channels ? channels - N : done;
    take_greatest<N>(x + c, y + c, won == nullptr ? nullptr : won + c, part);
  }
}

template <int N, bool alone>
LAYERS_INLINE void backward_lanes(const float* dy, const int32_t* won, float* dx, size_t channels, const Part& part) {
  for (size_t done = 0; done < channels; done += N) {
    const size_t c = done + N > channels ? channels - N : done;
    give_winners<N, alone>(dy + c, won + c, dx + c, part, done - c);
  }
}

LAYERS_TARGET void forward_last(const float* x, float* y, uint8_t* won, size_t channels, const Windows& w,
                                size_t row) {
  each_window(channels, w, row, [&](const Part& part, size_t corner, size_t top) LAYERS_LAMBDA {
    uint8_t* places = won == nullptr ? nullptr : won + top;
    if (channels >= 16) return forward_lanes<16>(x + corner, y + top, places, channels, part);
    if (channels >= 4) return forward_lanes<4>(x + corner, y + top, places, channels, part);
    forward_lanes<1>(x + corner, y + top, places, channels, part);
  });
}

template <bool alone>
LAYERS_INLINE void backward_row(const float* dy, const uint8_t* won, float* dx, size_t channels, const Windows& w,
                                size_t row) {
  each_window(channels, w, row, [&](const Part& part, size_t corner, size_t top) LAYERS_LAMBDA {
    int32_t places[kBlock];
    for (size_t c = 0; c < channels; c += kBlock) {
      const size_t n = channels - c < kBlock ? channels - c : kBlock, at = top + c;
      for (size_t k = 0; k < n; ++k) places[k] = won[at + k];
      float* to = dx + corner + c;
      if (n >= 16) {
        backward_lanes<16, alone>(dy + at, places, to, n, part);
      } else if (n >= 4) {
        backward_lanes<4, alone>(dy + at, places, to, n, part);
      } else {
        backward_lanes<1, alone>(dy + at, places, to, n, part);
      }
    }
  });
}

LAYERS_TARGET void backward_last(const float* dy, const uint8_t* won, float* dx, size_t channels, const Windows& w,
                                 size_t row, bool alone) {
  if (alone) return backward_row<true>(dy, won, dx, channels, w, row);
  backward_row<false>(dy, won, dx, channels, w, row);
}

// Planes -------------------------------------------------------------------------------------------------------

// best, places: of n windows; x: the values at `place`, `step` floats apart.
LAYERS_INLINE void greater(float* __restrict best, int32_t* __restrict places, const float* __restrict x, size_t step,
                           size_t n, int32_t place) {
  for (size_t k = 0; k < n; ++k) {
    const float value = x[k * step];
    const bool better = (value > best[k]) | (value != value);
    best[k] = better ? value : best[k];
    places[k] = better ? place : places[k];
  }
}

// The windows [begin, begin + n) of a row of one plane, n up to kBlock.
LAYERS_TARGET void forward_block(const float* x, float* y, uint8_t* won, const Windows& w, size_t row, size_t begin,
                                 size_t n) {
  const Span v = span(row, w.stride_h, w.pad_h, w.kernel_h, w.height);
  int32_t places[kBlock];
  for (size_t k = 0; k < n; ++k) {
    const size_t start = (begin + k) * w.stride_w;
    places[k] = static_cast<int32_t>(v.first * w.kernel_w + (start < w.pad_w ? w.pad_w - start : 0));
    y[k] = -__builtin_inff();
  }
  for (size_t i = v.first; i < v.first + v.count; ++i) {
    const float* line = x + (v.pixel + i - v.first) * w.width;
    for (size_t j = 0; j < w.kernel_w; ++j) {
      // Windows whose place j lies in the image: pad <= k stride + j < width + pad.
      const size_t low = j < w.pad_w ? (w.pad_w - j + w.stride_w - 1) / w.stride_w : 0;
      const size_t high = w.width + w.pad_w > j ? (w.width + w.pad_w - j - 1) / w.stride_w + 1 : 0;
      const size_t from = low > begin ? low : begin, to = high < begin + n ? high : begin + n;
      if (from >= to) continue;
      const float* first = line + (from * w.stride_w + j - w.pad_w);
      const auto place = static_cast<int32_t>(i * w.kernel_w + j);
      float* best = y + (from - begin);
      int32_t* at = places + (from - begin);
      if (w.stride_w == 1) {
        greater(best, at, first, 1, to - from, place);
      } else if (w.stride_w == 2) {
        greater(best, at, first, 2, to - from, place);
      } else {
        greater(best, at, first, w.stride_w, to - from, place);
      }
    }
  }
  if (won == nullptr) return;
  for (size_t k = 0; k < n; ++k) won[k] = static_cast<uint8_t>(places[k]);
}

}  // namespace LAYERS_SET

#undef LAYERS_INLINE
#undef LAYERS_LAMBDA
#undef LAYERS_SET
#undef LAYERS_TARGET
