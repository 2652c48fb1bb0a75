// A vector that holds up to N elements in itself, more on the heap: dimensions, operands, coordinates. A graph has
// hundreds of thousands of them, nearly all of a few elements, and passes copy them.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

namespace whale {

// As std::vector, for types that are copied byte by byte. Moving one may move its elements: references end with it.
template <class T, uint32_t N>
class SmallVector {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  using value_type = T;
  using size_type = size_t;
  using difference_type = ptrdiff_t;
  using reference = T&;
  using const_reference = const T&;
  using iterator = T*;
  using const_iterator = const T*;

  SmallVector() = default;
  explicit SmallVector(size_t n, T value = T{}) { resize(n, value); }
  SmallVector(std::initializer_list<T> list) { assign(list.begin(), list.end()); }
  SmallVector(const std::vector<T>& list) { assign(list.begin(), list.end()); }  // never back by itself
  template <std::input_iterator It>
  SmallVector(It first, It last) {
    assign(first, last);
  }
  SmallVector(const SmallVector& other) { *this = other; }
  SmallVector(SmallVector&& other) noexcept
      : store_(other.store_), size_(std::exchange(other.size_, 0)), room_(std::exchange(other.room_, N)) {}
  ~SmallVector() { drop(); }

  SmallVector& operator=(const SmallVector& other) {
    if (this == &other) return *this;
    if (room_ <= N && other.room_ <= N) {
      store_ = other.store_;
    } else {
      reserve(other.size_);
      std::copy_n(other.data(), other.size_, data());
    }
    size_ = other.size_;
    return *this;
  }
  SmallVector& operator=(SmallVector&& other) noexcept {
    SmallVector taken(std::move(other));
    std::swap(store_, taken.store_), std::swap(size_, taken.size_), std::swap(room_, taken.room_);
    return *this;
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return room_ > N ? store_.far : store_.near; }
  const T* data() const { return room_ > N ? store_.far : store_.near; }
  iterator begin() { return data(); }
  iterator end() { return data() + size_; }
  const_iterator begin() const { return data(); }
  const_iterator end() const { return data() + size_; }
  auto rbegin() const { return std::make_reverse_iterator(end()); }
  auto rend() const { return std::make_reverse_iterator(begin()); }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }
  const T& at(size_t i) const { return i < size_ ? data()[i] : throw std::out_of_range("SmallVector::at"); }
  T& at(size_t i) { return const_cast<T&>(std::as_const(*this).at(i)); }
  T& front() { return data()[0]; }
  const T& front() const { return data()[0]; }
  T& back() { return data()[size_ - 1]; }
  const T& back() const { return data()[size_ - 1]; }

  void reserve(size_t n) {
    if (n <= room_) return;
    T* far = std::allocator<T>{}.allocate(n);
    std::copy_n(data(), size_, far);
    drop();
    store_.far = far, room_ = static_cast<uint32_t>(n);
  }
  void resize(size_t n, T value = T{}) {
    reserve(n);
    if (n > size_) std::fill(end(), data() + n, value);
    size_ = static_cast<uint32_t>(n);
  }
  void clear() { size_ = 0; }
  void push_back(T value) {
    if (size_ == room_) reserve(size_t{room_} * 2);
    data()[size_++] = value;
  }
  template <class... Args>
  T& emplace_back(Args&&... args) {
    push_back(T(std::forward<Args>(args)...));
    return back();
  }
  void pop_back() { --size_; }
  void assign(size_t n, T value) { clear(), resize(n, value); }
  template <std::input_iterator It>
  void assign(It first, It last) {  // not of itself
    clear();
    insert(end(), first, last);
  }

  iterator insert(const_iterator at, T value) { return insert(at, &value, &value + 1); }
  iterator insert(const_iterator at, std::initializer_list<T> list) { return insert(at, list.begin(), list.end()); }
  template <std::input_iterator It>
  iterator insert(const_iterator at, It first, It last) {  // not of itself
    const ptrdiff_t place = at - begin();
    const size_t before = size_;
    if constexpr (std::forward_iterator<It>) {
      const size_t wanted = size_ + static_cast<size_t>(std::distance(first, last));
      if (wanted > room_)
        reserve(before == 0 ? wanted : std::max(wanted, size_t{room_} * 2));  // many appends: few copies
    }
    for (; first != last; ++first) push_back(static_cast<T>(*first));
    std::rotate(begin() + place, begin() + before, end());
    return begin() + place;
  }
  iterator erase(const_iterator at) { return erase(at, at + 1); }
  iterator erase(const_iterator first, const_iterator last) {
    std::copy(last, std::as_const(*this).end(), begin() + (first - begin()));
    size_ -= static_cast<uint32_t>(last - first);
    return begin() + (first - begin());
  }

  friend bool operator==(const SmallVector& a, const SmallVector& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }
  friend auto operator<=>(const SmallVector& a, const SmallVector& b) {
    return std::lexicographical_compare_three_way(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  void drop() {
    if (room_ > N) std::allocator<T>{}.deallocate(store_.far, room_);
  }

  union Store {
    T near[N];
    T* far;
  };
  Store store_{};
  uint32_t size_ = 0, room_ = N;
};

using Ints = SmallVector<int64_t, 4>;  // dimensions, attributes, coordinates of a mesh

}  // namespace whale
