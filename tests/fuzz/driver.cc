// Runs a fuzz target without libFuzzer, as an ordinary test: the seeds, then deterministic random mutations of them
// (flipped bits, overwritten numbers, truncations, splices, repeated and deleted runs). `target [count [seed]]`, or
// `target FILE...` to replay what libFuzzer found.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/philox.h"
#include "fuzz.h"

namespace whale::fuzz {
namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : stream_(seed, hash_name("fuzz"), 0) {}
  uint64_t next() {
    counter_ += 2;
    return (uint64_t{stream_.word(counter_ - 2)} << 32) | stream_.word(counter_ - 1);
  }
  size_t below(size_t n) { return n == 0 ? 0 : static_cast<size_t>(next() % n); }

 private:
  RandomStream stream_;
  uint64_t counter_ = 0;
};

// Numbers that break things: ends of ranges, signs, off by one.
constexpr int64_t kEvil[] = {0,
                             1,
                             -1,
                             2,
                             7,
                             8,
                             127,
                             128,
                             255,
                             256,
                             32767,
                             65535,
                             INT32_MAX,
                             INT32_MIN,
                             0xFFFFFFFF,
                             INT64_MAX,
                             INT64_MIN,
                             int64_t{1} << 40,
                             int64_t{1} << 62};

// The first `kinds` kinds of change: 3 keep every byte in its place, so that what is behind the check of structure is
// reached.
void mutate(Bytes& b, const Bytes& other, const std::vector<std::string>& words, size_t kinds, Random& random) {
  const size_t at = random.below(b.size());
  switch (random.below(kinds)) {
    case 0:
      if (!b.empty()) b[at] ^= static_cast<uint8_t>(1u << random.below(8));
      break;
    case 1:
      if (!b.empty()) b[at] = static_cast<uint8_t>(random.next());
      break;
    case 2: {  // a number, mostly where one stands
      const size_t width = size_t{1} << random.below(4);
      const int64_t value = kEvil[random.below(std::size(kEvil))];
      const size_t place = at / width * width;
      if (place + width <= b.size()) std::memcpy(b.data() + place, &value, width);
      break;
    }
    case 3: b.resize(at); break;
    case 4: {  // a run of another seed
      const size_t from = random.below(other.size()), n = std::min(other.size() - from, 1 + random.below(64));
      b.insert(b.begin() + static_cast<std::ptrdiff_t>(at), other.begin() + static_cast<std::ptrdiff_t>(from),
               other.begin() + static_cast<std::ptrdiff_t>(from + n));
      break;
    }
    case 5: {  // over what is there
      const size_t from = random.below(other.size()),
                   n = std::min({other.size() - from, b.size() - at, 1 + random.below(64)});
      std::copy_n(other.begin() + static_cast<std::ptrdiff_t>(from), n, b.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    }
    case 6: {
      const size_t n = std::min(b.size() - at, 1 + random.below(16));
      b.erase(b.begin() + static_cast<std::ptrdiff_t>(at), b.begin() + static_cast<std::ptrdiff_t>(at + n));
      break;
    }
    case 7: {  // four bytes changed by a little: offsets that point elsewhere
      const size_t place = at / 4 * 4;
      if (place + 4 > b.size()) break;
      uint32_t value;
      std::memcpy(&value, b.data() + place, 4);
      value += static_cast<uint32_t>(4 * (static_cast<int>(random.below(65)) - 32));
      std::memcpy(b.data() + place, &value, 4);
      break;
    }
    default:
      if (!words.empty()) {
        const std::string& w = words[random.below(words.size())];
        b.insert(b.begin() + static_cast<std::ptrdiff_t>(at), w.begin(), w.end());
      }
  }
  if (b.size() > (1u << 20)) b.resize(1u << 20);
}

// A copy of exactly this size, so that the address sanitizer sees a read past its end.
void run(const Bytes& b) {
  auto* copy = static_cast<uint8_t*>(std::malloc(b.size() + (b.empty() ? 1 : 0)));
  if (!b.empty()) std::memcpy(copy, b.data(), b.size());
  const auto begin = std::chrono::steady_clock::now();
  LLVMFuzzerTestOneInput(copy, b.size());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::free(copy);
  if (seconds > 10) {
    std::fprintf(stderr, "an input of %zu bytes took %.1f s\n", b.size(), seconds);
    std::exit(1);
  }
}

}  // namespace
}  // namespace whale::fuzz

int main(int argc, char** argv) {
  using namespace whale::fuzz;
  if (argc > 1 && std::strspn(argv[1], "0123456789") != std::strlen(argv[1])) {
    for (int i = 1; i < argc; ++i) {
      std::ifstream in(argv[i], std::ios::binary);
      run(Bytes(std::istreambuf_iterator<char>(in), {}));
    }
    return 0;
  }
  const long count = argc > 1 ? std::atol(argv[1]) : 50000;
  const std::vector<Bytes> corpus = seeds();
  const std::vector<std::string> words = tokens();
  run({});
  for (const Bytes& b : corpus) {
    run(b);
    for (size_t n = 0; n < b.size(); n += 1 + b.size() / 256)
      run(Bytes(b.begin(), b.begin() + static_cast<std::ptrdiff_t>(n)));
  }
  Random random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  for (long i = 0; i < count; ++i) {
    Bytes b = corpus[random.below(corpus.size())];
    const size_t kinds = random.below(4) == 0 ? 9 : 3, changes = 1 + random.below(random.below(4) > 0 ? 2 : 8);
    for (size_t k = 0; k < changes; ++k) mutate(b, corpus[random.below(corpus.size())], words, kinds, random);
    run(b);
  }
  std::printf("%ld mutations of %zu seeds\n", count, corpus.size());
  return 0;
}
