// A list and a set that are known while compiling, for the records of operations.
#pragma once

#include <cstddef>
#include <initializer_list>

namespace jaxsoft {

// At most eight items.
template <class Item>
class List {
 public:
  constexpr List() = default;
  constexpr List(std::initializer_list<Item> items) {
    for (const Item& item : items) items_[size_++] = item;
  }
  constexpr size_t size() const { return size_; }
  constexpr const Item& operator[](size_t i) const { return items_[i]; }
  constexpr const Item* begin() const { return items_; }
  constexpr const Item* end() const { return items_ + size_; }

 private:
  Item items_[8] = {};
  size_t size_ = 0;
};

// Values of an enumeration.
template <class Enum>
class Set {
 public:
  constexpr Set() = default;  // for {}, which nvcc 13.0 would otherwise take for a list of one value
  constexpr Set(std::initializer_list<Enum> values) {
    for (Enum value : values) bits_ |= 1u << static_cast<unsigned>(value);
  }
  constexpr bool has(Enum value) const { return bits_ >> static_cast<unsigned>(value) & 1u; }

 private:
  unsigned bits_ = 0;
};

}  // namespace jaxsoft
